"""What the README shows runs, and does what its comments say."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_memory_by_itself_shares_three_blocks(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    exec(example, names)
    state = names["state"]
    assert state.tables[0].ids[:2, :4].tolist() == [[0, 1, 2, 3], [0, 1, 2, 20]]
    assert state.seqs.lengths.tolist() == [14, 12, 0, 0]
    printed = capsys.readouterr().out
    assert "\n3 12 [" in printed
    assert printed.count("STORED") == 3
