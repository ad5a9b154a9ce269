"""Prefill in one process, decode in another: caches come whole, choices are learnt from, failures are recomputed."""

import pytest
import torch
from kvserve_helpers import same
from link_helpers import LAYOUT, QUICK, client, server
from tiny import save, tiny_llama

from diffkv_repro.kvserve import NAMED
from diffkv_repro.kvserve.client import KVClient
from diffkv_repro.kvserve.controller import ControllerSettings
from diffkv_repro.kvserve.disagg import DecodeWorker, PrefillWorker, generate, greedy, measure_streams
from diffkv_repro.kvserve.keys import load_keys, make_keys
from diffkv_repro.kvserve.latency import NO_COMPRESSION, MeasuredProfile
from diffkv_repro.kvserve.layout import KVLayout
from diffkv_repro.kvserve.link import LinkError
from diffkv_repro.kvserve.quality import continue_from
from diffkv_repro.kvserve.server import KVServer
from diffkv_repro.kvserve.shaper import Shaper
from diffkv_repro.kvserve.sources import MadeUpSource, ModelSource
from diffkv_repro.kvserve.terms import Ask, prompt_of
from diffkv_repro.models.zoo import load_model


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    return folder


@pytest.fixture(scope="module")
def process(keys):
    with server(keys) as running:
        yield running


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("count", [1, 63, 257])
def test_a_cache_arrives_bit_for_bit(process, keys, count, overlap):
    ids = tuple(range(1, count + 1))
    with client(keys, process.endpoint) as one:
        got = one.fetch(Ask(ids, overlap=overlap, options={"profile": "none"}))
    assert same(got.kv, MadeUpSource(LAYOUT).compute(ids).kv)
    assert got.profile == "none"
    assert got.sent_bytes == pytest.approx(got.raw_bytes, rel=0.02) or count == 1
    assert got.stages.total > 0


def test_a_compressed_cache_is_what_its_profile_gives(process, keys):
    ids = tuple(range(200))
    with client(keys, process.endpoint) as one:
        got = one.fetch(Ask(ids, options={"profile": "int4"}))
    want = NAMED["int4"].encode(MadeUpSource(LAYOUT).compute(ids).kv, LAYOUT)
    assert same(got.kv, want.decode())
    assert 3 < got.ratio < 4


def test_the_rate_of_the_link_is_that_of_the_shaper_and_goodput_is_what_was_achieved(process, keys):
    ids = tuple(range(400))
    with client(keys, process.endpoint) as one:
        rates = [one.fetch(Ask(ids, options={"profile": "none", "rate": rate})).goodput for rate in (2e6, 4e6)]
        one.fetch(Ask(ids[:2], options={"rate": None}))
    for rate, asked in zip(rates, (2e6, 4e6), strict=True):
        assert 0.6 * asked < rate < 1.02 * asked, "never more than the link gives; less on a busy machine"


def test_what_is_learnt_comes_from_the_far_side_too():
    source, reports = MadeUpSource(LAYOUT), []
    measured = [MeasuredProfile.from_speed("int4", 3.5, 1e9)]
    worker = PrefillWorker(source, {"int4": NAMED["int4"]}, measured, ControllerSettings(epsilon=0))
    with (
        KVServer(worker, keys=None, endpoint="tcp://127.0.0.1:*", shaper=Shaper(3e6), on_served=reports.append) as own,
        KVClient(LAYOUT, keys=None, endpoint=own.endpoint, settings=QUICK) as one,
    ):
        first, second = (one.fetch(Ask(tuple(range(300)), overlap=False)) for _ in range(2))
    assert "bandwidth is not known" in first.why
    assert second.profile == "int4"
    assert len(reports) == 2
    for report in reports:
        parts = report.prefill + report.encode + report.send + report.decode
        assert 0.9 * parts < report.observed < parts + 1.0
        assert report.observed >= report.encode + report.send
        assert 1.5e6 < report.goodput < 3.1e6


def test_profiles_are_measured_on_the_way_that_a_worker_takes():
    profiles = {"int4": NAMED["int4"], "kivi-2bit": NAMED["kivi-2bit"]}
    source, ids = MadeUpSource(LAYOUT), range(256)
    found = {one.name: one for one in measure_streams(profiles, source, ids, repeats=1, quality={"int4": {"*": 0.9}})}
    assert set(found) == set(profiles)
    for name, one in found.items():
        whole = profiles[name].encode(source.compute(ids).kv, LAYOUT)
        assert one.ratio == pytest.approx(LAYOUT.raw_bytes(256) / whole.nbytes)
        assert one.encode > 0 < one.decode
    assert found["int4"].quality_of("any") == 0.9


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(str(save(tiny_llama(heads=6, kv_heads=2), tmp_path_factory.mktemp("tiny"))), device="cpu")


def test_greedy_tokens_are_those_of_a_single_process(loaded):
    source = ModelSource(loaded, dtype=torch.float32)
    worker = PrefillWorker(source, {}, [])
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    with (
        KVServer(worker, keys=None, endpoint="tcp://127.0.0.1:*") as own,
        KVClient(source.layout, keys=None, endpoint=own.endpoint, settings=QUICK) as one,
    ):
        done, said = greedy(loaded, DecodeWorker(source, one), ids, 8)
    assert done.how == "transfer"
    with torch.inference_mode():
        alone = loaded.model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert said == alone[0, len(ids) :].tolist()


def test_going_on_step_by_step_is_going_on_at_once(loaded):
    source = ModelSource(loaded, dtype=torch.float32)
    kv = source.compute([5, 4, 3, 2]).kv
    said = list(generate(loaded, kv, 1, 6))
    together = continue_from(loaded, kv, torch.tensor([[1, *said[:-1]]]))
    assert together.argmax(-1).tolist() == said


def test_a_prefix_is_extended_by_what_is_missing(loaded):
    source = ModelSource(loaded, dtype=torch.float32)
    ids = list(range(1, 30))
    whole = source.compute(ids).kv
    longer = source.extend(source.compute(ids[:16]).kv, ids)
    for (a, b), (c, d) in zip(whole.pairs, longer.pairs, strict=True):
        torch.testing.assert_close(a, c, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(b, d, atol=1e-5, rtol=1e-4)
    made_up = MadeUpSource(LAYOUT)
    assert same(made_up.extend(made_up.compute(ids[:16]).kv, ids), made_up.compute(ids).kv)


def test_no_server_no_harm(keys):
    with KVClient(LAYOUT, keys=load_keys(keys, "client"), endpoint="tcp://127.0.0.1:9", settings=QUICK) as one:
        done = DecodeWorker(MadeUpSource(LAYOUT), one).complete(Ask((1, 2, 3)))
    assert done.how == "recompute"
    assert "no connection to tcp://127.0.0.1:9" in done.reason
    assert DecodeWorker(MadeUpSource(LAYOUT), None).complete(Ask((1, 2, 3))).how == "recompute"


def test_an_slo_that_cannot_be_kept_is_recomputed(process, keys):
    ids = tuple(range(400))
    with client(keys, process.endpoint) as one:
        one.fetch(Ask(ids, options={"profile": "none", "rate": 4e6}))
        worker = DecodeWorker(MadeUpSource(LAYOUT), one)
        hopeless = worker.complete(Ask(ids, slo=1e-4, options={"rate": 4e6}))
        easy = worker.complete(Ask(ids, slo=60.0, options={"rate": 4e6}))
        one.fetch(Ask(ids[:2], options={"rate": None}))
    assert (hopeless.how, easy.how) == ("recompute", "transfer")
    assert "SLO" in hopeless.reason
    assert same(hopeless.kv, MadeUpSource(LAYOUT).compute(ids).kv)


def test_another_model_is_refused(process, keys):
    other = KVLayout(24, 2, 32, torch.float16, model="another")
    with client(keys, process.endpoint, layout=other) as one, pytest.raises(LinkError, match="another model"):
        one.fetch(Ask((1, 2, 3)))


def test_without_keys_only_this_host_is_let_in(keys):
    worker = PrefillWorker(MadeUpSource(LAYOUT), {}, [])
    with pytest.raises(LinkError, match="on the loopback alone"):
        KVServer(worker, keys=None, endpoint="tcp://0.0.0.0:*")
    with pytest.raises(LinkError, match="'nowhere' is no address"):
        KVClient(LAYOUT, keys=load_keys(keys, "client"), endpoint="nowhere")
    with pytest.raises(LinkError, match="cannot listen on nowhere"):
        KVServer(worker, keys=load_keys(keys, "server"), endpoint="nowhere")


def test_options_are_for_experiments_alone():
    source = MadeUpSource(LAYOUT)
    with (
        KVServer(PrefillWorker(source, {}, []), keys=None, endpoint="tcp://127.0.0.1:*") as own,
        KVClient(LAYOUT, keys=None, endpoint=own.endpoint, settings=QUICK) as one,
        pytest.raises(LinkError, match="--experiment"),
    ):
        one.fetch(Ask((1, 2), options={"profile": "none"}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ask(()), "ids are 0 tokens"),
        (lambda: Ask((1,), slo=0), "slo is 0"),
        (lambda: prompt_of([1]), "at least 2 are needed"),
        (lambda: PrefillWorker(MadeUpSource(LAYOUT), {}, [MeasuredProfile.from_speed("x", 2, 1e9)]), "lack x"),
        (lambda: PrefillWorker(MadeUpSource(LAYOUT), {}, [NO_COMPRESSION]), "must differ"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
