"""What processes of the tests of compiled steps do."""

from experiments import sharded_job
from models.config import DecoderConfig

# Eight KV heads of four query heads each, and sizes that eight devices can share; all of them differ.
SMALL = DecoderConfig(2048, 1024, 5, 32, 8, 128, 1536, dtype="bfloat16", param_dtype="bfloat16", tied_embeddings=False)
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
        max_model_len=1024,
        ffn=("model", "kv"),
        vocab=("model", "kv"),
        replicate_kv_heads=True,
        dump_dir=dump_dir,
    )
