import pytest

from pallas_kernels.dispatch import dispatch


def double(x):
    return 2 * x


def refuse(x):
    raise ValueError("x is odd")


def lack(x):
    raise NotImplementedError("needs a device")


def break_down(x):
    raise RuntimeError("a defect")


BACKENDS = {"xla": double, "refuse": refuse, "lack": lack, "broken": break_down}


def test_no_choice_takes_the_platforms_backend():
    assert dispatch("op", BACKENDS, None, 3) == 6


def test_a_name_takes_that_backend():
    assert dispatch("op", {"xla": refuse, "other": double}, "other", 3) == 6


def test_a_missing_backend_names_those_that_exist():
    with pytest.raises(NotImplementedError, match=r"op has no backend 'triton'; it has \['xla', 'refuse'"):
        dispatch("op", BACKENDS, "triton", 3)


def test_interpret_takes_the_fastest_interpreter_that_can():
    backends = {"xla": break_down, "mosaic_tpu_interpret": break_down, "triton_interpret": double}
    assert dispatch("op", backends, "interpret", 3) == 6
    backends = {"xla": break_down, "mosaic_tpu_interpret": double, "triton_interpret": refuse}
    assert dispatch("op", backends, "interpret", 3) == 6
    assert dispatch("op", backends, ["refuse", "interpret", "xla"], 3) == 6
    with pytest.raises(NotImplementedError, match=r"op has no backend 'interpret'; it has \['xla'\]"):
        dispatch("op", {"xla": double}, "interpret", 3)
    assert dispatch("op", {"xla": double}, ["interpret", "xla"], 3) == 6


def test_a_list_falls_through_to_the_first_that_can():
    assert dispatch("op", BACKENDS, ["triton", "lack", "refuse", "xla"], 3) == 6


def test_a_list_in_which_none_can_gives_every_reason():
    with pytest.raises(
        NotImplementedError, match=r"triton: op has no.*lack: needs a device; refuse: x is odd"
    ) as error:
        dispatch("op", BACKENDS, ("triton", "lack", "refuse"), 3)
    assert isinstance(error.value.__cause__, ExceptionGroup)
    assert len(error.value.__cause__.exceptions) == 3


def test_a_single_name_keeps_its_own_error():
    with pytest.raises(ValueError, match="x is odd") as error:
        dispatch("op", BACKENDS, "refuse", 3)
    assert error.value.__notes__ == [
        "op: the backend was 'refuse', on a cpu; 'interpret' runs the kernels of absent devices"
    ]


def test_a_defect_is_not_swallowed():
    with pytest.raises(RuntimeError, match="a defect"):
        dispatch("op", BACKENDS, ["broken", "xla"], 3)


def test_an_empty_list_is_refused():
    with pytest.raises(ValueError, match="backend must be None, a name or a non-empty list"):
        dispatch("op", BACKENDS, [], 3)
