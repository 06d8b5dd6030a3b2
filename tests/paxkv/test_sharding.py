"""What the host looks at of arrays that lie on many devices."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from paxkv.sharding import MeshShape, everywhere, make_mesh, partition, put


@pytest.mark.parametrize("shape", [MeshShape(4, 2, 1), MeshShape(1, 2, 4)], ids=lambda shape: shape.name)
def test_arrays_of_replicas_become_whole_on_every_device_in_one_exchange(shape):
    mesh = make_mesh(shape, q_heads=2, kv_heads=2)
    by_replica = NamedSharding(mesh, partition(("replicas",)))
    rng = np.random.default_rng(0)
    tree = [rng.integers(99, size=(shape.data, *own), dtype=np.int32) for own in ((3,), (), (2, 3), (1,))]
    compiled = jax.jit(everywhere).lower([put(x, by_replica) for x in tree]).compile()
    whole = compiled([put(x, by_replica) for x in tree])
    assert all(x.is_fully_replicated and len(x.sharding.device_set) == 8 for x in whole)
    jax.tree.map(np.testing.assert_array_equal, whole, tree)
    assert compiled.as_text().count(" all-gather(") == (1 if shape.data > 1 else 0)
