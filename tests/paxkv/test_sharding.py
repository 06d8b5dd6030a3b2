"""What the host looks at of arrays that lie on many devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from paxkv.sharding import MeshShape, everywhere, make_mesh, partition, put


def test_arrays_of_replicas_become_whole_on_every_device_in_one_exchange():
    mesh = make_mesh(MeshShape(4, 2, 1), q_heads=2, kv_heads=2)
    by_replica = NamedSharding(mesh, partition(("replicas",)))
    tree = {
        "steps": jnp.arange(12).reshape(4, 3),
        "clock": 100 + jnp.arange(4),
        "rows": jnp.arange(24).reshape(4, 2, 3),
    }
    lying = jax.tree.map(lambda x: put(x.astype(jnp.int32), by_replica), tree)
    assert not any(x.is_fully_replicated for x in jax.tree.leaves(lying))
    compiled = jax.jit(everywhere).lower(lying).compile()
    whole = compiled(lying)
    assert all(x.is_fully_replicated and len(x.sharding.device_set) == 8 for x in jax.tree.leaves(whole))
    jax.tree.map(np.testing.assert_array_equal, whole, tree)
    assert compiled.as_text().count(" all-gather(") == 1
