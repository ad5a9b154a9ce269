"""lm-eval on a tiny model: FP16 is plain HFLM, compression shows, batches do not, and nothing is done twice."""

import json
import random
import re
from functools import partialmethod

import pytest
import yaml
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from diffkv_repro.cli import app
from diffkv_repro.evaluation import lm_eval_model
from diffkv_repro.evaluation.lm_eval_command import run_lm_eval
from diffkv_repro.evaluation.lm_eval_model import CompressedLM, register_models
from diffkv_repro.evaluation.teacher_forced import NotReadError
from diffkv_repro.models import load_model
from tests.tiny import save, tiny_llama

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

POLICY = {"window": 4, "alpha_high": 2, "alpha_low": 0.5}
EXACT = {"method": "fp16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = save(tiny_llama(), tmp_path_factory.mktemp("model"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    tokenizer.eos_token = "w2"
    tokenizer.save_pretrained(target)
    return str(target)


@pytest.fixture(scope="module")
def plain(folder):
    return HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1)


def model(folder, **options):
    return CompressedLM(folder, device="cpu", **options)


def text(rng, count):
    return " ".join(f"w{rng.randrange(3, 97)}" for _ in range(count))


def requests(kind, arguments):
    document = {"kind": kind}
    return [Instance(kind, document, tuple(each), index, ("made", index, 1)) for index, each in enumerate(arguments)]


@pytest.fixture(scope="module")
def scored():
    rng = random.Random(0)
    context = text(rng, 20)
    pairs = [
        (text(rng, length), f" {text(rng, count)}") for length, count in ((30, 3), (11, 3), (25, 3), (18, 5), (1, 2))
    ]
    letters = [(context, f" w{index}") for index in (5, 6, 7, 8)]
    return requests("loglikelihood", [*pairs, *letters, ("", " w9 w10 w11"), (text(rng, 300), " w8 w9")])


@pytest.fixture(scope="module")
def written():
    rng = random.Random(1)
    options = {"until": ["w3"], "max_gen_toks": 8, "do_sample": False}
    return requests("generate_until", [(text(rng, length), options) for length in (30, 12, 21, 7)])


@pytest.fixture(scope="module")
def rolled():
    rng = random.Random(2)
    return requests("loglikelihood_rolling", [(text(rng, length),) for length in (60, 9, 300, 1)])


def test_full_precision_is_plain_hflm(folder, plain, scored, written, rolled):
    for storage, batch_size in (("packed", 1), ("simulated", 3)):
        ours = model(folder, **EXACT, storage=storage, batch_size=batch_size, rolling_prefix=16)
        found, expected = ours.loglikelihood(scored), plain.loglikelihood(scored)
        assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], abs=1e-4)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        assert ours.generate_until(written) == plain.generate_until(written)
        totals = ours.loglikelihood_rolling(rolled)
        assert totals == pytest.approx(plain.loglikelihood_rolling(rolled), abs=1e-3)
        kv = ours.get_model_info()["diffkv_repro"]["kv"]["made"]
        assert kv["nominal"] == 1
        assert kv["reads"] > 1000


@pytest.mark.parametrize(
    "options", [{"method": "uniform", "precision": "K2V2"}, POLICY, {"method": "h2o"}], ids=["uniform", "diffkv", "h2o"]
)
def test_batches_and_storages_change_nothing(folder, scored, written, rolled, options):
    single = model(folder, **options, storage="packed")
    batched = model(folder, **options, batch_size=3)
    for kind, given in (("loglikelihood", scored), ("loglikelihood_rolling", rolled)):
        one, three = getattr(single, kind)(given), getattr(batched, kind)(given)
        for found, expected in zip(one, three, strict=True):
            assert found == pytest.approx(expected, abs=1e-4)
    assert single.generate_until(written) == batched.generate_until(written)


def test_compression_shows_even_in_one_token(folder, plain, scored, written, rolled):
    ours = model(folder, method="uniform", precision="K1V1", rolling_prefix=16)
    letters = scored[5:9]
    exact = [total for total, _ in plain.loglikelihood(letters)]
    assert [total for total, _ in ours.loglikelihood(letters)] != pytest.approx(exact, abs=0.01)
    assert ours.answers.summaries()["made"]["reads"] == 4 * 3  # one token in three layers
    assert ours.loglikelihood_rolling(rolled)[0] != pytest.approx(plain.loglikelihood_rolling(rolled)[0], abs=0.01)
    assert ours.generate_until(written) != plain.generate_until(written)
    kv = ours.get_model_info()["diffkv_repro"]["kv"]["made"]
    assert kv["nominal"] == pytest.approx(1 / 16)
    assert set(kv["tokens"]) == {"K1V1", "pruned"}


def test_a_score_that_reads_nothing_is_refused(folder, scored):
    ours = model(folder, method="uniform", min_decoded=0)
    ours.loglikelihood(scored[:4])
    with pytest.raises(NotReadError, match="0 reads of the compressed cache where 3 were due"):
        ours.loglikelihood(scored[5:9])
    with pytest.raises(NotReadError, match="none of 1 loglikelihood requests read the compressed cache"):
        ours.loglikelihood(requests("loglikelihood", [("", " w9")]))
    with pytest.raises(NotReadError, match="never reads"):
        ours._model_call(None)


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling", "generate_until"])
def test_a_run_goes_on_where_it_stopped(folder, scored, written, rolled, tmp_path, monkeypatch, kind):
    given = {"loglikelihood": scored[:5], "loglikelihood_rolling": rolled[:2], "generate_until": written}[kind]
    whole = getattr(model(folder, **POLICY), kind)(given)
    calls = count_calls(monkeypatch, stop_after=1)
    options = POLICY | {"finished": str(tmp_path / "done.db")}
    with pytest.raises(KeyboardInterrupt):
        getattr(model(folder, **options), kind)(given)
    count_calls(monkeypatch, calls=calls)
    second = model(folder, **options)
    assert getattr(second, kind)(given) == whole
    assert len(calls) == len(given) - 1
    assert second.answers.resumed == 1
    third = model(folder, **options)
    assert getattr(third, kind)(given) == whole
    assert len(calls) == len(given) - 1
    assert third.answers.summaries() == second.answers.summaries()
    getattr(model(folder, **(options | {"window": 5})), kind)(given)
    assert len(calls) == 2 * len(given) - 1


def count_calls(monkeypatch, stop_after=None, calls=None):
    calls = [] if calls is None else calls
    calls.clear()
    real = {name: getattr(lm_eval_model, name) for name in ("score", "hold_back")}
    real = {name: getattr(function, "real", function) for name, function in real.items()}

    def counted(name):
        def call(*arguments, **options):
            if len(calls) == stop_after:
                raise KeyboardInterrupt
            calls.append(name)
            return real[name](*arguments, **options)

        call.real = real[name]
        return call

    for name in real:
        monkeypatch.setattr(lm_eval_model, name, counted(name))
    return calls


def test_sampled_answers_are_not_kept(folder, tmp_path):
    options = {"until": [], "max_gen_toks": 4, "do_sample": True, "temperature": 1.0}
    given = requests("generate_until", [("w5 w6 w7", options)])
    for _ in range(2):
        ours = model(folder, **EXACT, finished=tmp_path / "done.db")
        ours.generate_until(given)
        assert ours.answers.resumed == 0


def test_greedy_answers_are_kept_whatever_their_temperature(folder, tmp_path):
    options = {"until": [], "max_gen_toks": 4, "do_sample": False, "temperature": 1}  # as LongBench's tasks have it
    given = requests("generate_until", [("w5 w6 w7", options)])
    for resumed in (0, 1):
        ours = model(folder, **EXACT, finished=tmp_path / "done.db")
        ours.generate_until(given)
        assert ours.answers.resumed == resumed


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A task of each kind on 6 made-up documents."""
    target = tmp_path_factory.mktemp("tasks")
    rng = random.Random(3)
    rows = [{"text": text(rng, 15), "choices": [f"w{index}" for index in range(4)], "label": 2} for _ in range(6)]
    (target / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    common = {
        "dataset_path": "json", "test_split": "test", "num_fewshot": 0, "doc_to_text": "{{text}}", "tag": "tiny",
        "dataset_kwargs": {"data_files": {"test": str(target / "data.jsonl")}, "cache_dir": str(target / "cache")},
    }  # fmt: skip
    kinds = {
        "tiny_choice": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}"},
        "tiny_generation": {
            "output_type": "generate_until", "doc_to_target": "w7",
            "generation_kwargs": {"until": ["w3"], "max_gen_toks": 3},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
    }  # fmt: skip
    for name, settings in kinds.items():
        (target / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | common | settings))
    return target


def test_results_say_what_was_measured(folder, tasks):
    register_models()
    results = lm_eval.simple_evaluate(
        model="uniform", model_args={"pretrained": folder, "precision": "K2V2", "storage": "packed"}, device="cpu",
        tasks=["tiny"], task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )  # fmt: skip
    report = results["config"]["diffkv_repro"]
    assert (report["method"], report["storage"], report["resumed_requests"]) == ("K2V2", "packed", 0)
    assert {task: kv["requests"] for task, kv in report["kv"].items()} == {"tiny_choice": 24, "tiny_generation": 6}
    assert all(kv["reads"] > 0 and kv["nominal"] == 0.125 < kv["true"] for kv in report["kv"].values())
    assert results["config"]["model_sha"] == load_model(folder, device="cpu").fingerprint
    assert "acc_stderr,none" in results["results"]["tiny_choice"]
    assert "exact_match_stderr,none" in results["results"]["tiny_generation"]


def test_the_command_is_lm_evals_own(folder, tasks, tmp_path, monkeypatch, capsys):
    arguments = [
        "--model", "diffkv", "--model_args", f"pretrained={folder},policy=K8V4-K4V2,window=4",
        "--tasks", "tiny_choice,tiny_generation", "--include_path", str(tasks), "--limit", "3",
        "--use_cache", str(tmp_path / "cache"), "--output_path", str(tmp_path / "results.json"),
    ]  # fmt: skip
    # To find lm-eval's own ten thousand tasks takes seconds, and they are not wanted here.
    only_ours = partialmethod(TaskManager.__init__, include_defaults=False)
    monkeypatch.setattr(TaskManager, "__init__", only_ours)
    calls = count_calls(monkeypatch)
    done = CliRunner().invoke(app, ["lm-eval", "run", *arguments])
    assert done.exit_code == 0, done.output
    assert "|tiny_choice" in done.stdout
    assert "±" in done.stdout
    assert re.search(r"tiny_generation: DiffKV K8V4-K4V2, .*simulated storage, 3 requests: KV [\d.]+ % of", done.stderr)
    assert len(calls) == 6
    run_lm_eval([*arguments, "--verbosity", "WARNING"])
    assert len(calls) == 6
    first, second = (json.loads(path.read_text()) for path in sorted(tmp_path.glob("results_*.json")))
    assert first["results"] == second["results"]
    assert second["config"]["diffkv_repro"]["resumed_requests"] == 15
    assert second["config"]["diffkv_repro"]["kv"] == first["config"]["diffkv_repro"]["kv"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run_lm_eval(["--help"])
    assert "--apply_chat_template" in capsys.readouterr().out
    refused = CliRunner().invoke(app, ["lm-eval", "run", *arguments, "--model_args", "alpha_lo=1"])
    assert refused.exit_code == 2
    assert "unknown option alpha_lo of method diffkv" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trust_remote_code": True}, "trust_remote_code is True"),
        ({"batch_size": "auto"}, "batch_size is 'auto'; write a whole number"),
        ({"min_decoded": -1}, "min_decoded is -1"),
        ({"rolling_prefix": 0}, "rolling_prefix is 0"),
        ({"dtype": "int8x"}, "dtype is 'int8x'"),
        ({"storage": "disk"}, "unknown storage 'disk'"),
        ({"method": "kivi", "bit": 1}, "unknown option bit of method kivi"),
        ({"method": "uniform", "precision": "K4V4:3/1"}, "3 key groups do not divide a head_dim of 16"),
    ],
)
def test_refusals_come_before_the_first_request(folder, options, message):
    with pytest.raises(ValueError, match=message):
        model(folder, **options)


def test_a_name_is_a_method(folder):
    register_models()
    kind = lm_eval.api.registry.get_model("kivi")
    assert kind(folder, device="cpu", bits=4).method.bits == 4
    with pytest.raises(ValueError, match="--model kivi with method=h2o"):
        kind(folder, device="cpu", method="h2o")
    with pytest.raises(ValueError, match="use_cache would mix up the answers"):
        model(folder).set_cache_hook(None)
