"""One step of training, as a pure function of the state, the text and a key."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float32, Int32, Key, PyTree

from models.decoder import Decode, Decoder, Params, make_decode
from models.evaluate import token_nats
from models.training.config import OptimizerConfig, Phase, TrainConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that steps change, and all that a resumed run needs: there is no generator whose state could get lost.

    The curves are part of it, one entry for each step of the run and NaN where nothing was measured (yet), so that
    they are saved and resumed with the rest.
    """

    step: jax.Array  # i32[], steps taken
    params: Params
    optimizer: optax.OptState
    losses: jax.Array  # f32[steps], nats per byte of the step's windows, before the step
    gradient_norms: jax.Array  # f32[steps], before clipping
    heldout: jax.Array  # f32[steps], nats per byte of held-out text, after the step


def init_state(config: TrainConfig) -> tuple[Decode, TrainState, Key[Array, ""]]:
    """The function of the model, the state before the first step, and the key that all windows are drawn with."""
    weights_key, windows_key = jax.random.split(jax.random.key(config.seed))
    decode, params = make_decode(Decoder(config.model, rngs=nnx.Rngs(params=weights_key)))
    optimizer = make_optimizer(config.optimizer, config.steps).init(params)
    # An array each: a step donates its state, and no buffer can be given away twice.
    curves = [jnp.full((config.steps,), jnp.nan, jnp.float32) for _ in range(3)]
    return decode, TrainState(jnp.zeros((), jnp.int32), params, optimizer, *curves), windows_key


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate by step, over a run of `steps` steps: a straight line up, half a cosine down."""
    peak = config.peak_learning_rate
    return optax.warmup_cosine_decay_schedule(
        0.0, peak, config.warmup_steps, steps, end_value=peak * config.final_fraction
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer over a run of `steps` steps."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, steps),
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )


def decayed(params: Params) -> PyTree[bool]:
    """Which weights decay: the matrices of linear maps, and the embedding.

    Told by name and not by rank, for a bias of all heads has two axes and is none the less a bias.
    """

    def is_matrix(path: tuple, _: jax.Array) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return name.endswith("_proj") or name in ("embedding", "output")

    return jax.tree_util.tree_map_with_path(is_matrix, params)


@jax.jit(static_argnames=("decode", "phase", "optimizer"), donate_argnames="state")
def train_step(
    state: TrainState,
    text: Int32[Array, " bytes"],
    key: Key[Array, ""],
    *,
    decode: Decode,
    phase: Phase,
    optimizer: OptimizerConfig,
) -> tuple[TrainState, Float32[Array, ""]]:
    """Takes one step on windows drawn uniformly from `text`. Donates `state`.

    Args:
      state: before the step.
      text: as token ids.
      key: of the run; that of step i is `fold_in(key, i)`.
      decode: the model.
      phase: says how many windows, and how long.
      optimizer: makes the optimizer, over the steps that the state has room for.

    Returns:
      The state after the step, and the step's loss in nats per byte.
    """
    starts = jax.random.randint(jax.random.fold_in(key, state.step), (phase.batch, 1), 0, text.size - phase.context)
    windows = text[starts + jnp.arange(phase.context + 1)[None, :]]
    loss, gradients = jax.value_and_grad(lambda p: token_nats(decode, p, windows).mean())(state.params)
    # optax raises a Python float to an integer step count.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = make_optimizer(optimizer, state.losses.size).update(
            gradients, state.optimizer, state.params
        )
    after = TrainState(
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        optimizer=opt_state,
        losses=state.losses.at[state.step].set(loss),
        gradient_norms=state.gradient_norms.at[state.step].set(optax.tree.norm(gradients)),
        heldout=state.heldout,
    )
    return after, loss
