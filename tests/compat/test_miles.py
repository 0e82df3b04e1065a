"""The engine as miles's rollout function: its class, its inputs, its threads, its weight versions."""

import importlib
import sys
import threading
from argparse import ArgumentParser, Namespace

import pytest
import trio

from trio_rollout.errors import SettingsError
from trio_rollout_compat.miles import TrioRolloutFn
from trio_rollout_compat.miles._rollout import MORE_ARGUMENTS
from trio_rollout_compat.slime._arguments import ARGUMENTS, Arguments

from . import hosting
from .hosting import importable, rows, update_behind_our_back


@pytest.fixture
def host(monkeypatch):
    """Make miles importable; its loop ends with the test."""
    with importable(monkeypatch, "miles") as loops:
        yield loops


@pytest.fixture
def types(host):
    return importlib.import_module("miles.rollout.base_types")


@pytest.fixture
def call(host):
    """Call a rollout function as miles does, on a worker thread; return its answer."""
    compatibility = importlib.import_module("miles.rollout.inference_rollout.compatibility")
    return compatibility.call_rollout_function


@pytest.fixture
def make(host, types):
    """Load a class from its path, as miles does."""
    compatibility = importlib.import_module("miles.rollout.inference_rollout.compatibility")

    def make(args, source):
        given = types.RolloutFnConstructorInput(args, source)
        return compatibility.load_rollout_function(given, "trio_rollout_compat.miles.TrioRolloutFn")

    return make


def arguments(server, **more):
    return hosting.arguments(server, **{"custom_rm_path": None, **more})


def source():
    return hosting.DataSource(host="miles")


def train(types, rollout_id=0, weight_version=None):
    return types.RolloutFnTrainInput(rollout_id, weight_version=weight_version)


def test_the_stock_path_goes_through_the_native_client(types, make, call, server, caplog):
    fn = make(arguments(server), source())
    first, second = (call(fn, train(types, number)) for number in range(2))
    for output in (first, second):
        assert type(output) is types.RolloutFnTrainOutput
        assert [len(group) for group in output.samples] == [2, 2, 2]
        assert [sample.index for sample in rows(output)] == sorted(sample.index for sample in rows(output))
        for sample in rows(output):
            sample.validate()
            assert sample.status.value == "truncated"
            assert sample.reward == float(len(sample.response))
    assert len({sample.routing_key for sample in rows(first) + rows(second)}) == 12
    assert not hasattr(rows(first)[0], "session_id")


@pytest.mark.parametrize("name", ["generate_of_miles", "GenerateOfMiles"])
def test_generate_functions_of_one_input_run_on_miles_s_own_loop(types, make, call, seen, server, caplog, name):
    args = arguments(server, custom_generate_function_path=f"user_functions.{name}")
    output = call(make(args, source()), train(types))
    assert all(sample.response == "abc" for sample in rows(output))
    assert {thread for *_, thread in seen} == {"miles"}
    assert len({id(state) for _, state, *_ in seen}) == 1
    assert {evaluation for _, _, evaluation, _ in seen} == {False}


@pytest.mark.parametrize("name", ["generate", "fan_out"])
def test_generate_functions_with_slime_s_signature_work_too(types, make, call, seen, server, caplog, name):
    args = arguments(
        server, custom_generate_function_path=f"user_functions.{name}", custom_rm_path="user_functions.reward"
    )
    output = call(make(args, source()), train(types))
    made = [row for group in output.samples for row in group]
    assert all(isinstance(row, list) is (name == "fan_out") for row in made)
    assert (("batch", 2) if name == "fan_out" else ("single", 1)) in seen


def test_a_sample_s_own_reward_function_comes_first(types, make, call, seen, server, caplog):
    data, spec = source(), importlib.import_module("miles.utils.types").RewardSpec
    plain = data.get_samples

    def with_spec(count):
        groups = plain(count)
        for sample in (sample for group in groups for sample in group):
            sample.reward_spec = spec(custom_rm_path="user_functions.reward")
        return groups

    data.get_samples = with_spec
    output = call(make(arguments(server), data), train(types))
    assert all(sample.reward["score"] == float(sample.index) for sample in rows(output))


def test_train_and_eval_from_two_threads_at_once_share_an_engine(types, make, call, seen, server, caplog):
    config = Namespace(
        name="a", path="a", temperature=0.5, top_p=1.0, top_k=-1, max_response_len=4, n_samples_per_eval_prompt=2,
        input_key=None, label_key=None, metadata_key=None, tool_key=None, inject_metadata=lambda given: {"of": "eval"},
    )  # fmt: skip
    path = "user_functions.train_waits_for_eval"
    args = arguments(server, custom_generate_function_path=path, eval_datasets=[config])
    data = source()
    train_fn, eval_fn, answers = make(args, data), make(args, data), {}

    def run(name, fn, given):
        answers[name] = call(fn, given)

    threads = [
        threading.Thread(target=run, args=("train", train_fn, train(types))),
        threading.Thread(target=run, args=("eval", eval_fn, types.RolloutFnEvalInput(0))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rows(answers["train"])) == 6
    assert type(answers["eval"]) is types.RolloutFnEvalOutput
    assert [sample.index for sample in answers["eval"].data["a"]["samples"]] == list(range(6))
    assert answers["eval"].data["a"]["rewards"] == [3.0] * 6
    assert len(data.threads) == 1


async def all_sampled_then_updated(fake):
    """Six groups of two were sampled; then the host puts new weights in, without a word to the engine."""
    await fake.until(lambda: len(fake.generates) >= 12 and not fake.in_flight)
    fake.version = "2"


@pytest.mark.parametrize(("limit", "versions"), [(0, {"2"}), (1, {"2"}), (2, {"0", "2"}), (None, {"0", "2"})])
def test_groups_older_than_the_weight_version_allows_are_sampled_again(
    types, make, call, server, caplog, limit, versions
):
    """Three groups of version 0 wait when miles says that the weights are at version 2."""
    server.value.version = "0"
    fn = make(arguments(server, max_weight_staleness=limit), source())
    first = call(fn, train(types))
    assert {version for sample in rows(first) for version in sample.weight_versions} == {"0"}
    server.call(all_sampled_then_updated, server.value)
    second = call(fn, train(types, 1, weight_version=2))
    assert {version for sample in rows(second) for version in sample.weight_versions} <= versions
    assert len(rows(second)) == 6
    stale = sum(second.metrics[f"rollout/fully_async/{what}_stale"] for what in ("requeued", "retried"))
    assert (stale > 0) is (versions == {"2"})


def test_staleness_of_custom_functions_is_that_of_their_samples_oldest_version(types, make, call, seen, server, caplog):
    path = "user_functions.older_first"
    fn = make(arguments(server, max_weight_staleness=1, custom_generate_function_path=path), source())
    output = call(fn, train(types, 0, weight_version=5))
    assert all(sample.weight_versions == ["5"] for sample in rows(output))
    assert output.metrics["rollout/fully_async/retried_stale"] > 0


def test_an_update_behind_our_back_is_survived(types, make, call, server, caplog):
    from trio_rollout.testing import Run

    server.value.plan = [Run(), Run()]
    fn, answers = make(arguments(server, rollout_batch_size=1), source()), []
    caller = threading.Thread(target=lambda: answers.append(call(fn, train(types))))
    caller.start()
    server.call(update_behind_our_back, server.value)
    caller.join()
    assert len(rows(answers[0])) == 2
    assert answers[0].metrics["rollout/fully_async/retried_server_abort"] == 2
    assert answers[0].metrics["rollout/fully_async/quarantined"] == 0


def test_samples_that_miles_has_reset_for_a_retry_are_taken(types, make, call, server, caplog):
    """miles's reset leaves samples ABORTED; that has no meaning here."""
    data = source()
    plain = data.get_samples

    def reset(count):
        groups = plain(count)
        for sample in (sample for group in groups for sample in group):
            sample.reset_for_retry()
        return groups

    data.get_samples = reset
    assert len(rows(call(make(arguments(server), data), train(types)))) == 6


def test_close_gives_the_unfinished_groups_back(types, make, call, seen, server, caplog):
    data = source()
    fn = make(arguments(server), data)
    output = call(fn, train(types))
    fn.close()
    back = [sample for groups in data.returned for group in groups for sample in group]
    assert len(back) + len(rows(output)) == 2 * data.taken
    assert len(data.threads) == 1
    fn.close()  # nothing is left to close


def test_what_cannot_be_done_is_refused(types, make, call, server, caplog):
    with pytest.raises(SettingsError, match="--use-rollout-routing-replay"):
        make(arguments(server, use_rollout_routing_replay=True), source())
    fn = make(arguments(server), source())
    with pytest.raises(SettingsError, match="generate_state"):
        call(fn, types.RolloutFnEvalInput(0, generate_state=object()))


def test_every_argument_that_is_read_is_listed_with_its_default():
    assert dict(MORE_ARGUMENTS) == {
        "max_weight_staleness": None,
        "async_max_concurrent_samples": None,
        "chat_template_path": None,
    }
    names = {**ARGUMENTS, **MORE_ARGUMENTS}
    more = {"rollout_batch_size": 4, "n_samples_per_prompt": 2}
    assert Arguments(Namespace(**more, async_max_concurrent_samples=7), "miles", names).groups_at_once == 3
    assert Arguments(Namespace(**more), "miles", names).groups_at_once == 4
    assert Arguments(Namespace(**more, max_weight_staleness=3), "miles", names).staleness.max_versions == 3
    assert Arguments(Namespace(**more, max_weight_staleness=3)).staleness.max_versions is None


def test_miles_s_parser_learns_the_timeout_flag():
    parser = ArgumentParser()
    TrioRolloutFn.add_arguments(parser)
    assert parser.parse_args([]).rollout_group_timeout_s == 1800.0


async def test_importing_the_adapter_does_not_import_miles():
    program = "import sys, trio_rollout_compat.miles; print('miles' in sys.modules)"
    answer = await trio.run_process([sys.executable, "-c", program], capture_stdout=True)
    assert answer.stdout == b"False\n"
