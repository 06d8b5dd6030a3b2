"""Every way a trace file can be wrong or merely unusual: taken right, or refused with file and line."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.workloads import TraceError, read_trace, statistics

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
FIRST = "2023-11-16 18:15:46.6805900,374,44"
SHAREGPT = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
MOONCAKE = {"timestamp": 10, "input_length": 513, "output_length": 4, "hash_ids": [0, 1]}


def _read(tmp_path, kind, content, **options):
    path = tmp_path / ("trace.jsonl" if kind == "mooncake" else "trace.csv")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_trace(kind, path, **options)


def _mooncake(**changes):
    return json.dumps(MOONCAKE | changes)


def _refused(tmp_path, kind, content, line, problem, **options):
    with pytest.raises(TraceError, match=problem) as caught:
        _read(tmp_path, kind, content, **options)
    name = "trace.jsonl" if kind == "mooncake" else "trace.csv"
    assert (caught.value.file, caught.value.line) == (name, line)
    assert str(caught.value).startswith(name if line is None else f"{name}, line {line}: ")
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("", "expected 3 fields, got 0"),
        ("2023-11-16 18:15:47.0000000,1", "expected 3 fields, got 2"),
        ("2023-11-16 18:15:47.0000000,1,2,3", "expected 3 fields, got 4"),
        ("2023-11-16 18:15:47.0000000,-1,2", "ContextTokens as a whole number.*'-1'"),
        ("2023-11-16 18:15:47.0000000,1,-2", "GeneratedTokens as a whole number.*'-2'"),
        ("2023-11-16 18:15:47.0000000,nan,2", "ContextTokens as a whole number.*'nan'"),
        ("2023-11-16 18:15:47.0000000,,2", "ContextTokens as a whole number.*''"),
        ("2023-11-16 18:15:47.0000000,1.0,2", "ContextTokens as a whole number.*'1.0'"),
        ("2023-11-16 18:15:47.0000000, 1,2", "ContextTokens as a whole number.*' 1'"),
        ("2023-11-16 18:15:47.0000000,1_0,2", "ContextTokens as a whole number.*'1_0'"),
        ("2023-11-16 18:15:47.0000000,+1,2", "ContextTokens as a whole number.*'.1'"),
        ("2023-11-16 18:15:47.0000000,\u0661,2", "ContextTokens as a whole number"),
        ("2023-11-16 18:15:47.0000000,2147483648,2", "ContextTokens as a whole number.*2147483648"),
        ("2023-11-16 18:15:47.0000000," + "9" * 5000 + ",2", "ContextTokens as a whole number"),
        ("2023-11-16 18:15:47.0000000,1,0", "at least 1 output token, got 0; set zero_output"),
        ("2023-11-16 18:15:47.0000000,0,1", "at least 1 prompt token, got 0"),
        ("2023-11-16 18:15:46.6805899,1,2", "times in order, got one 0.0001 ms before"),
        ("2023-11-16T18:15:47.0000000,1,2", "TIMESTAMP as YYYY-MM-DD hh:mm:ss.fffffff"),
        ("2023-11-16 18:15:47.,1,2", "TIMESTAMP as YYYY-MM-DD hh:mm:ss.fffffff"),
        ("2023-11-16 18:15:47+01:00,1,2", "TIMESTAMP as YYYY-MM-DD hh:mm:ss.fffffff"),
        ("NaT,1,2", "TIMESTAMP as YYYY-MM-DD hh:mm:ss.fffffff"),
        ("2023-13-16 18:15:47.0000000,1,2", "TIMESTAMP as a time that exists.*2023-13-16"),
        ("2023-11-31 18:15:47.0000000,1,2", "TIMESTAMP as a time that exists.*2023-11-31"),
        ('2023-11-16 18:15:47.0000000,"1,2', "comma-separated fields"),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_bad_azure_row_is_refused_with_its_line(tmp_path, row, problem, end):
    good = "2023-11-17 00:00:00.0000000,1,1"
    _refused(tmp_path, "azure", end.join([AZURE, FIRST, row, good]) + end, 3, problem)
    _refused(tmp_path, "azure", end.join([AZURE, FIRST, row]) + (end if row == "" else ""), 3, problem)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("10,5,16,2.0", "num_total_tokens = 15, the sum of the two others, got 16"),
        ("10,5,15,3.0", "pd_ratio = 2.0, got '3.0'"),
        ("10,5,15,nan", "pd_ratio = 2.0, got 'nan'"),
        ("10,5,15,", "pd_ratio = 2.0, got ''"),
        ("10,5,-15,2.0", "num_total_tokens as a whole number"),
        ("10,0,10,inf", "at least 1 output token"),
        ("10,0,10,2.0", "pd_ratio = inf, got '2.0'"),
        ("10,5,15", "expected 4 fields, got 3"),
    ],
)
def test_bad_sharegpt_row_is_refused_with_its_line(tmp_path, row, problem):
    _refused(tmp_path, "sharegpt_stats", f"{SHAREGPT}\n1,2,3,0.5\n{row}\n", 3, problem)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("6,ChatGPT,10,5,16,API log", "Total tokens = 15, the sum of the two others, got 16"),
        ("nan,ChatGPT,10,5,15,API log", "Timestamp as seconds >= 0, got 'nan'"),
        ("inf,ChatGPT,10,5,15,API log", "Timestamp as seconds >= 0, got 'inf'"),
        ("-6,ChatGPT,10,5,15,API log", "Timestamp as seconds >= 0, got '-6'"),
        ("4.999,ChatGPT,10,5,15,API log", "times in order, got one 1.0 ms before"),
        ("6,ChatGPT,10,0,10,API log", "at least 1 output token"),
        ("6,ChatGPT,0,0,0,API log", "at least 1 output token"),
        ("6,ChatGPT,10,5,15", "expected 6 fields, got 5"),
        ("6,Chat,GPT,10,5,15,API log", "expected 6 fields, got 7"),
    ],
)
def test_bad_burstgpt_row_is_refused_with_its_line(tmp_path, row, problem):
    _refused(tmp_path, "burstgpt", f"{BURSTGPT}\n5,GPT-4,1,2,3,API log\n{row}", 3, problem)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("", "expected a JSON object, got ''"),
        ("{", "expected a JSON object, got '{'"),
        ("[1, 2]", "an object with the keys timestamp, input_length, output_length, hash_ids"),
        ("[]", "an object with the keys"),
        ("null", "an object with the keys"),
        ("[" * 100_000, "expected a JSON object"),
        (_mooncake(session=3), "an object with the keys"),
        (json.dumps({k: v for k, v in MOONCAKE.items() if k != "hash_ids"}), "an object with the keys"),
        (_mooncake()[:-1] + ', "timestamp": 11}', "an object with the keys"),
        (_mooncake(timestamp=float("nan")), "timestamp as milliseconds >= 0, got nan"),
        (_mooncake(timestamp=float("inf")), "timestamp as milliseconds >= 0, got inf"),
        (_mooncake(timestamp=-1), "timestamp as milliseconds >= 0, got -1"),
        (_mooncake(timestamp="11"), "timestamp as milliseconds >= 0, got '11'"),
        (_mooncake(timestamp=True), "timestamp as milliseconds >= 0, got True"),
        (_mooncake(timestamp=10**400), "timestamp as milliseconds >= 0"),
        (_mooncake(timestamp=9), "times in order, got one 1.0 ms before"),
        (_mooncake(input_length=513.0), "input_length as a whole number.*513.0"),
        (_mooncake(input_length=True), "input_length as a whole number.*True"),
        (_mooncake(input_length="513"), "input_length as a whole number.*'513'"),
        (_mooncake(output_length=-1), "output_length as a whole number.*-1"),
        (_mooncake(output_length=float("nan")), "output_length as a whole number.*nan"),
        (_mooncake(output_length=0), "at least 1 output token"),
        (_mooncake(hash_ids=[0]), "expected 2 hash ids for 513 prompt tokens, got 1"),
        (_mooncake(hash_ids=None), "hash_ids as a list"),
        (_mooncake(hash_ids=[0, -1]), "hash_ids as a list"),
        (_mooncake(hash_ids=[0, 2**63]), "hash_ids as a list"),
        (_mooncake(hash_ids=[0, 1.0]), "hash_ids as a list"),
        (_mooncake(hash_ids=[2, 1]), "hash id 1 to follow 0 as it did above, it follows 2"),
        (_mooncake(hash_ids=[1, 5]), "hash id 1 to follow 0 as it did above, it follows None"),
    ],
)
def test_bad_mooncake_row_is_refused_with_its_line(tmp_path, row, problem):
    _refused(tmp_path, "mooncake", f"{_mooncake()}\n{row}\n{_mooncake()}\n", 2, problem)


@pytest.mark.parametrize(
    ("kind", "content", "line", "problem"),
    [
        ("azure", b"", 1, "expected the header"),
        ("azure", b"\n" + AZURE.encode(), 1, "expected the header"),
        ("azure", AZURE.encode(), None, "expected at least 1 requests, got 0"),
        ("azure", FIRST.encode(), 1, "expected the header.*374"),
        ("azure", f"{BURSTGPT}\n5,GPT-4,1,2,3,API log".encode(), 1, "expected the header"),
        ("azure", f"{AZURE},Extra\n{FIRST},1".encode(), 1, "expected the header"),
        ("azure", f"{AZURE}\n{FIRST}".encode("utf-16"), 1, "expected UTF-8 text"),
        ("azure", f"{AZURE}\n{FIRST}\n".encode() + b"\xff,1,2", 3, "expected UTF-8 text"),
        ("azure", f"{AZURE}\r{FIRST}\r".encode(), 1, "expected comma-separated fields"),
        ("azure", f"{AZURE}\n{FIRST}\n\n".encode(), 3, "expected 3 fields, got 0"),
        ("mooncake", b"", None, "expected at least 1 requests, got 0"),
    ],
)
def test_file_of_another_kind_is_refused(tmp_path, kind, content, line, problem):
    _refused(tmp_path, kind, content, line, problem)


def test_missing_file_other_hash_and_broken_gzip_are_refused(tmp_path):
    with pytest.raises(TraceError, match=r"^none\.csv: cannot be read: No such file"):
        read_trace("azure", tmp_path / "none.csv")
    _refused(tmp_path, "azure", f"{AZURE}\n{FIRST}", None, "whose sha256 is 0123, got [0-9a-f]{64}$", sha256="0123")
    whole = gzip.compress(_mooncake().encode())
    for name, data in (("cut", whole[:-5]), ("plain", _mooncake().encode()), ("flipped", whole[:20] + whole[21:])):
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(data)
        with pytest.raises(TraceError, match=rf"^{name}\.jsonl\.gz: expected a whole gzip file"):
            read_trace("mooncake", path)


def test_asking_more_requests_than_the_file_holds_is_refused(tmp_path):
    _refused(tmp_path, "azure", f"{AZURE}\n{FIRST}", None, "at least 2 requests, got 1", num_requests=2)


def test_reading_stops_after_the_requests_asked_for(tmp_path):
    workload = _read(tmp_path, "azure", f"{AZURE}\n{FIRST}\nrubbish", num_requests=1)
    assert (workload.num_requests, workload.provenance.rows_read) == (1, 1)


def test_azure_times_keep_all_seven_digits(tmp_path):
    rows = ["2023-11-16 23:59:59.9999999,1,1", "2023-11-17 00:00:00.0000000,1,1", "2023-11-17 00:00:00.1234567,1,1"]
    workload = _read(tmp_path, "azure", "\n".join([AZURE, *rows]))
    assert workload.arrival_ms.tolist() == [0, 0.0001, 123.4568]


def test_azure_times_may_be_whole_seconds_or_name_utc(tmp_path):
    rows = ["2024-02-28 23:59:59,1,1", "2024-02-29 00:00:00.5+00:00,1,1", "2024-03-01 00:00:00.000001,1,1"]
    workload = _read(tmp_path, "azure", "\n".join([AZURE, *rows]))
    assert workload.arrival_ms.tolist() == [0, 1500, 86_401_000.001]


def test_time_before_the_row_above_is_refused_even_if_after_the_first(tmp_path):
    rows = [f"{second},GPT-4,1,1,2,API log" for second in (1, 3, 2)]
    _refused(tmp_path, "burstgpt", "\n".join([BURSTGPT, *rows]), 4, "got one 1000.0 ms before the row above")


def test_empty_line_is_reported_as_empty_whatever_its_end(tmp_path):
    _refused(tmp_path, "mooncake", f"{_mooncake()}\r\n\r\n{_mooncake()}", 2, "expected a JSON object, got ''")


def test_equal_times_are_in_order(tmp_path):
    workload = _read(tmp_path, "azure", f"{AZURE}\n{FIRST}\n{FIRST}")
    assert workload.arrival_ms.tolist() == [0, 0]


def test_quoted_fields_are_read_as_their_contents(tmp_path):
    workload = _read(tmp_path, "burstgpt", f'{BURSTGPT}\n5.25,"GPT-4, turbo",1,2,3,"API ""log"""\n')
    assert workload.arrival_ms.tolist() == [5250]
    assert workload.prompt_len.tolist() == [1]


ZERO_ROWS = "0,GPT-4,10,0,10,API log\n1,GPT-4,0,0,0,API log\n2,GPT-4,7,3,10,API log\n3,GPT-4,8,0,8,API log\n"


def test_zero_output_rows_are_dropped_and_counted(tmp_path):
    workload = _read(tmp_path, "burstgpt", f"{BURSTGPT}\n{ZERO_ROWS}", zero_output="drop")
    assert workload.arrival_ms.tolist() == [2000]
    provenance = workload.provenance
    assert (provenance.rows_read, provenance.zero_output, provenance.zero_output_dropped) == (4, 3, 3)


def test_dropping_the_first_azure_row_keeps_the_trace_s_zero(tmp_path):
    content = f"{AZURE}\n2023-11-16 18:15:46.0000000,374,0\n2023-11-16 18:15:47.5000000,374,44"
    assert _read(tmp_path, "azure", content, zero_output="drop").arrival_ms.tolist() == [1500]


def test_kept_zero_output_rows_are_counted_and_make_no_nan(tmp_path):
    rows = ZERO_ROWS.splitlines()
    workload = _read(tmp_path, "burstgpt", "\n".join([BURSTGPT, rows[0], rows[3]]), zero_output="keep")
    assert workload.output_len.tolist() == [0, 0]
    assert (workload.provenance.zero_output, workload.provenance.zero_output_dropped) == (2, 0)
    assert all(value is None or np.isfinite(value) for value in statistics(workload).values())


def test_keeping_zero_outputs_does_not_keep_empty_prompts(tmp_path):
    _refused(tmp_path, "burstgpt", f"{BURSTGPT}\n{ZERO_ROWS}", 3, "at least 1 prompt token", zero_output="keep")


def test_file_of_zero_outputs_alone_is_refused(tmp_path):
    rows = ZERO_ROWS.splitlines()[:2]
    _refused(tmp_path, "burstgpt", "\n".join([BURSTGPT, *rows]), None, "got 0", zero_output="drop")


_COUNT = st.integers(1, 2**31 - 1)


@given(
    rows=st.lists(st.tuples(st.integers(0, 10**13), _COUNT, _COUNT), min_size=1, max_size=8),
    bom=st.booleans(),
    end=st.sampled_from(["\n", "\r\n"]),
    final_end=st.booleans(),
)
def test_burstgpt_rows_survive_any_layout(tmp_path_factory, rows, bom, end, final_end):
    rows = sorted(rows)
    lines = [BURSTGPT] + [
        f"{ns // 10**9}.{ns % 10**9:09d},GPT-4,{prompt},{output},{prompt + output},API log"
        for ns, prompt, output in rows
        if prompt + output < 2**31
    ]
    rows = [row for row in rows if row[1] + row[2] < 2**31]
    if not rows:
        return
    content = ("\ufeff" if bom else "") + end.join(lines) + (end if final_end else "")
    workload = _read(tmp_path_factory.getbasetemp(), "burstgpt", content)
    assert workload.arrival_ms.tolist() == [ns / 1e6 for ns, _, _ in rows]
    assert workload.prompt_len.tolist() == [prompt for _, prompt, _ in rows]
    assert workload.output_len.tolist() == [output for _, _, output in rows]


@given(prompts=st.lists(st.integers(1, 3000), min_size=1, max_size=5), bom=st.booleans(), compressed=st.booleans())
def test_mooncake_rows_survive_any_layout(tmp_path_factory, prompts, bom, compressed):
    chains, next_id = [], 0
    for prompt in prompts:
        blocks = -(-prompt // 512)
        chains.append(list(range(next_id, next_id + blocks)))
        next_id += blocks
    text = ("\ufeff" if bom else "") + "\n".join(
        _mooncake(timestamp=i * 250.5, input_length=prompt, hash_ids=chain)
        for i, (prompt, chain) in enumerate(zip(prompts, chains, strict=True))
    )
    path = tmp_path_factory.getbasetemp() / ("layout.jsonl.gz" if compressed else "layout.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    workload = read_trace("mooncake", path)
    assert workload.arrival_ms.tolist() == [i * 250.5 for i in range(len(prompts))]
    assert workload.prompt_len.tolist() == prompts
    assert [ids.tolist() for ids in workload.hash_ids] == chains
