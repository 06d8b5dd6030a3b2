"""What processes of the tests of compiled steps do."""

from experiments import sharded_job
from models.config import DecoderConfig

# Eight KV heads of four query heads each, and sizes that fill whole tiles of a TPU's memory on each of eight devices.
SMALL = DecoderConfig(4096, 1024, 8, 32, 8, 128, 2048, dtype="bfloat16", param_dtype="bfloat16", tied_embeddings=False)
ROWS = 16


def compile_small(target, mesh, dump_dir):
    """A step over a pool of some 400 MB a device, far more than the step needs besides."""
    return sharded_job.compile_step(
        config=SMALL,
        target=target,
        mesh=mesh,
        usable_bytes=600_000_000,
        reserve_bytes=2**26,
        laid_out_anew=False,
        memory={"block_size": 16},
        kv_format="bf16",
        rows=ROWS,
        max_model_len=2048,
        ffn=("model", "kv"),
        vocab=("model", "kv"),
        replicate_kv_heads=True,
        dump_dir=dump_dir,
    )
