"""What the README shows runs, and does what its comments say."""

import pathlib
import re

import numpy as np

README = pathlib.Path(__file__).parents[1] / "README.md"


def run(word):
    """The names that the example with this word in it leaves behind."""
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = (text for text in examples if word in text)
    names = {}
    exec(example, names)
    return names


def test_the_memory_by_itself_shares_three_blocks(capsys):
    state = run("memory.publish")["state"]
    assert state.tables[0].ids[:2, :4].tolist() == [[0, 1, 2, 3], [0, 1, 2, 20]]
    assert state.seqs.lengths.tolist() == [14, 12, 0, 0]
    printed = capsys.readouterr().out
    assert "\n3 12 [" in printed
    assert printed.count("STORED") == 3


def test_the_attention_by_itself_is_softmax_attention_over_the_window():
    names = run("paged_attention(")
    q, k, v, out = (np.asarray(names[name], np.float64) for name in ("q", "k", "v", "out"))
    # The last token of the second sequence, at position 29 of blocks 7 and 2, sees 24; head 5 reads KV head 1.
    keys, values = (np.concatenate([x[7], x[2]])[6:30, 1] for x in (k, v))
    weights = np.exp(keys @ q[4, 5] / 8)
    np.testing.assert_allclose(out[4, 5], weights @ values / weights.sum(), rtol=2e-5, atol=1e-6)


def test_the_simulation_by_itself_serves_everybody_in_order_of_length():
    names = run("Simulator(memory")
    progress, requests = names["progress"], names["requests"]
    np.testing.assert_array_equal(progress.generated, requests.output_lens)
    waited = progress.admitted_at - np.asarray(requests.arrivals)
    short = np.asarray(requests.prompt_lens + requests.output_lens) < 500
    assert waited[short].mean() < waited[~short].mean() / 2
