import pytest

from diffkv_repro.evaluation.digest import code_digest


def test_names_the_code_it_covers():
    assert len({code_digest(), code_digest("evaluation/decoding"), code_digest("evaluation/generation")}) == 3
    assert code_digest("evaluation/decoding") == code_digest("evaluation/decoding")


def test_a_module_that_has_moved_is_noticed():
    with pytest.raises(ValueError, match="evaluation/nothing names no module"):
        code_digest("evaluation/nothing")
