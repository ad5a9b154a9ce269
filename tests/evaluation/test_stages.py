"""Stage times are of what they say; a paced link carries every byte, no faster than its pace."""

import pytest
from kvserve_helpers import kv_of, layout_of

from diffkv_repro.evaluation import stages
from diffkv_repro.evaluation.stages import Sent, Stages, equation_error, paced_transfer, send, time_stages
from diffkv_repro.kvserve import MeasuredProfile, Profile
from diffkv_repro.models import load_model
from tests.cache_helpers import ids_of
from tests.evaluation.test_lm_eval_model import folder  # noqa: F401 (a fixture)


def test_stages_are_timed_and_shares_follow_equation_1(folder):  # noqa: F811
    loaded = load_model(folder, device="cpu")
    found = time_stages(loaded, ids_of(40), new_tokens=5, repeats=1)
    assert found.prefill > 0
    assert found.decode > 0
    assert found.raw_bytes == 40 * 2 * 3 * 2 * 16 * 2  # tokens, K and V, layers, heads, channels, bytes
    made = Stages(100, 3.0, 1.0, 8_000_000)
    assert made.share(2e6) == pytest.approx(0.5)
    assert made.share(2e6) > made.share(2e7) > made.share(1e12) > 0
    with pytest.raises(ValueError, match="new_tokens 0"):
        time_stages(loaded, ids_of(40), new_tokens=0)


@pytest.mark.parametrize("size", [1, 1 << 14, (1 << 20) + 3])
def test_a_paced_link_is_never_faster_than_its_pace(size):
    bandwidth = 20e6
    seconds = paced_transfer(bytes(size), bandwidth)
    assert seconds >= 0.99 * size / bandwidth
    with pytest.raises(ValueError, match="bandwidth is 0"):
        paced_transfer(b"x", 0)


def test_a_receiver_left_alone_says_so(monkeypatch):
    monkeypatch.setattr(stages, "_send", lambda sender, data, bandwidth: sender.close())
    with pytest.raises(ConnectionError, match="9 bytes before the end"):
        paced_transfer(bytes(9), 1e6)


def test_what_is_sent_is_the_frame():
    layout = layout_of()
    kv = kv_of(layout, 200)
    sent = send(Profile.parse("none | uniform | ans"), kv, layout, 1e6)
    frame = Profile.parse("none | uniform | ans").encode(kv, layout)
    assert sent.wire >= 0.99 * frame.nbytes / 1e6
    assert sent.total == sent.encode + sent.wire + sent.decode
    model = MeasuredProfile("made", 4.0, 1e6, 2e6)
    assert equation_error(model, 1_000_000, 1e6, [Sent(1, 0.25, 0.5)]) == pytest.approx(0)
    assert equation_error(model, 1_000_000, 1e6, [Sent(1, 2, 0.5)]) == pytest.approx(0.5)
