"""The engine as slime's rollout function: its plug-ins, its types, its threads; servers are a fake one on a socket."""

import importlib
import sys
import threading
from argparse import ArgumentParser, Namespace

import pytest
import trio

from trio_rollout import Retry
from trio_rollout.errors import GenerateError, RolloutError, ServerLost, SettingsError
from trio_rollout.testing import Run
from trio_rollout_compat.slime import _adapters, add_arguments, close_engines, generate_rollout
from trio_rollout_compat.slime._arguments import ARGUMENTS, REFUSED, REQUIRED, Arguments

from .hosting import DataSource, arguments, importable, rows, update_behind_our_back


@pytest.fixture
def host(monkeypatch):
    """Make slime importable; its loop ends with the test."""
    with importable(monkeypatch, "slime") as loops:
        yield loops


def test_the_stock_path_goes_through_the_native_client(host, server, caplog):
    source = DataSource()
    args = arguments(server)
    first, second = (generate_rollout(args, number, source) for number in range(2))

    assert type(first).__name__ == "RolloutFnTrainOutput"
    for output in (first, second):
        assert [len(group) for group in output.samples] == [2, 2, 2]
        assert [sample.index for sample in rows(output)] == sorted(sample.index for sample in rows(output))
        for sample in rows(output):
            assert sample.response_length == len(sample.rollout_log_probs) == 8
            assert len(sample.tokens) > 8
            assert sample.status.value == "truncated"
            assert sample.reward == float(len(sample.response))
            assert sample.loss_mask is None
    assert not {s.index for s in rows(first)} & {s.index for s in rows(second)}
    assert len({sample.session_id for sample in rows(first) + rows(second)}) == 12
    assert first.metrics["rollout/fully_async/quarantined"] == 0


def test_the_data_source_is_called_from_one_thread_and_gets_back_what_is_unfinished(host, seen, server, caplog):
    source = DataSource()
    args = arguments(
        server, custom_generate_function_path="user_functions.generate", custom_rm_path="user_functions.reward"
    )
    output = generate_rollout(args, 0, source)
    close_engines()
    assert len(source.threads) == 1
    assert threading.current_thread() not in source.threads
    assert len(source.returned) <= 2  # what waited, and what was ready
    back = [sample for groups in source.returned for group in groups for sample in group]
    assert not {sample.index for sample in back} & {sample.index for sample in rows(output)}
    assert len(back) + len(rows(output)) == 2 * source.taken
    assert all(not sample.response and sample.session_id is None for sample in back)


def test_custom_functions_run_on_slime_s_own_loop(host, seen, server, caplog):
    args = arguments(
        server, custom_generate_function_path="user_functions.generate", custom_rm_path="user_functions.reward"
    )
    output = generate_rollout(args, 0, DataSource())
    assert all(sample.reward == {"score": float(sample.index), "note": "text"} for sample in rows(output))
    calls = [entry for entry in seen if entry[0] not in {"single", "batch"}]
    assert {thread for *_, thread in calls} == {"slime"}
    assert all(params["max_new_tokens"] == 7 for _, _, params, _ in calls)
    assert ("single", 1) in seen


def test_fan_out_keeps_its_shape_and_is_scored_in_one_call(host, seen, server, caplog):
    args = arguments(
        server, custom_generate_function_path="user_functions.fan_out", custom_rm_path="user_functions.reward"
    )
    output = generate_rollout(args, 0, DataSource())
    assert [[len(samples) for samples in group] for group in output.samples] == 3 * [[2, 2]]
    assert [sample.response for sample in output.samples[0][0]] == ["abc", "abcdef"]
    assert ("batch", 2) in seen


def test_group_rm_scores_whole_groups(host, seen, server, caplog):
    args = arguments(
        server,
        custom_generate_function_path="user_functions.generate",
        custom_rm_path="user_functions.reward",
        group_rm=True,
    )
    output = generate_rollout(args, 0, DataSource())
    assert all(sample.reward["score"] == sample.index for sample in rows(output))
    assert ("batch", 2) in seen
    assert ("single", 1) not in seen
    with pytest.raises(SettingsError, match="evaluation has no groups"):
        generate_rollout(args, 0, DataSource(), evaluation=True)


@pytest.mark.parametrize(
    ("reward", "key"), [("uneven_reward", "score"), ("uneven_reward", None), ("worded_reward", None)]
)
def test_f106_the_names_in_a_hosts_reward_are_its_own_business(host, seen, server, caplog, reward, key):
    args = arguments(
        server,
        custom_generate_function_path="user_functions.generate",
        custom_rm_path=f"user_functions.{reward}",
        reward_key=key,
    )
    output = generate_rollout(args, 0, DataSource())
    assert all(isinstance(sample.reward, dict) for sample in rows(output))
    assert output.metrics["rollout/fully_async/quarantined"] == 0


def test_filters(host, seen, server, caplog):
    args = arguments(
        server,
        custom_generate_function_path="user_functions.generate",
        dynamic_sampling_filter_path="user_functions.drop_some",
        rollout_sample_filter_path="user_functions.mark",
    )
    output = generate_rollout(args, 0, DataSource())
    assert all(group[0].group_index % 2 == 0 and group[0].remove_sample for group in output.samples)
    assert output.metrics["rollout/dynamic_filter/drop_unnamed"] > 0


def test_what_the_host_aborted_is_tried_again_from_a_pristine_sample(host, seen, server, caplog):
    """More aborts than a group has attempts, so they can't have used one up."""
    args = arguments(server, rollout_batch_size=1, custom_generate_function_path="user_functions.aborted_first")
    output = generate_rollout(args, 0, DataSource())
    assert all(sample.response == "abc" for sample in rows(output))
    assert output.metrics["rollout/fully_async/quarantined"] == 0
    assert output.metrics["rollout/fully_async/retried_server_lost"] >= 2
    sessions = [entry[1] for entry in seen if len(entry) == 2]
    assert len(sessions) == len(set(sessions))


def test_a_sample_that_the_hosts_buffer_has_finished_stays_as_it_is(host, seen, server, caplog):
    """The finished siblings of a group that the host's own function had aborted: only the others are sampled."""
    source = DataSource(4)
    taken = source.get_samples

    def get_samples(count):
        groups = taken(count)
        for group in groups:
            for sample in group[:3]:
                user_functions.answer(sample, "kept").reward = 5.0
        return groups

    source.get_samples = get_samples
    user_functions = importlib.import_module("user_functions")
    args = arguments(
        server,
        n_samples_per_prompt=4,
        rollout_batch_size=2,
        partial_rollout=True,
        custom_rm_path="user_functions.reward",
        reward_key="score",
        custom_generate_function_path="user_functions.generate",
    )
    output = generate_rollout(args, 0, source)
    for group in output.samples:
        assert [sample.response for sample in group] == ["kept"] * 3 + ["abc"]
        assert [sample.reward for sample in group[:3]] == [5.0] * 3
    assert {entry[0] % 4 for entry in seen if entry[0] not in {"single", "batch"}} == {3}


def test_a_function_that_aborts_everything_ends_the_run(host, seen, server, caplog, monkeypatch):
    """With a warning; the source is not drained meanwhile."""
    monkeypatch.setattr(_adapters, "ROUNDS", 3)
    monkeypatch.setattr(_adapters, "_FIRST_PAUSE_S", 0.01)
    source = DataSource()
    args = arguments(server, custom_generate_function_path="user_functions.always_aborted")
    with pytest.raises(RolloutError, match=r"failed for good .*GenerateError: \d+ answers in a row came back aborted"):
        generate_rollout(args, 0, source)
    assert "answers in a row came back aborted, and nothing else in between" in caplog.text


async def test_aborts_in_a_row_are_waited_out_longer_and_longer(autojump_clock):
    """One round may be an update's and costs nothing; another kind of result resets the count; after 20 rounds it fails."""
    aborts, lost, begun = _adapters.Aborts(at_once=4), ServerLost("aborted"), trio.current_time()
    for _ in range(4):
        await aborts.note(lost)
    assert trio.current_time() == begun
    await aborts.note(lost)
    assert trio.current_time() == begun + 0.5
    aborts.forget()

    async def always():
        while True:
            await aborts.note(lost)

    begun = trio.current_time()
    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(always)
    assert {str(error).partition(",")[0] for error in caught.value.exceptions} <= {
        f"{number} answers in a row came back aborted" for number in range(81, 85)
    }
    assert caught.group_contains(GenerateError, match="with 4 in flight")
    assert 400 < trio.current_time() - begun < 500


def test_a_data_source_that_has_nothing_at_the_moment_is_asked_again(host, seen, server, caplog):
    """Requeued groups run meanwhile, and closing does not wait for the source."""
    source = DataSource()
    real, asked = source.get_samples, []

    def now_and_then(count):
        asked.append(count)
        return real(1) if len(asked) % 3 == 0 and source.taken < 3 else []

    source.get_samples = now_and_then
    args = arguments(server, custom_generate_function_path="user_functions.aborted_first")
    output = generate_rollout(args, 0, source)
    assert [group[0].group_index for group in output.samples] == [0, 1, 2]
    assert "gave no group 2 times in a row" in caplog.text
    close_engines()


def test_an_update_behind_our_back_is_survived(host, server, caplog):
    """The host pauses the server, which aborts everything; then it continues under another version."""
    server.value.plan = [Run(), Run()]
    results = []
    args = arguments(server, rollout_batch_size=1)
    source = DataSource()
    caller = threading.Thread(target=lambda: results.append(generate_rollout(args, 0, source)))
    caller.start()

    server.call(update_behind_our_back, server.value)
    caller.join()
    (output,) = results
    assert len(rows(output)) == 2
    assert output.metrics["rollout/fully_async/retried_server_abort"] == 2
    assert output.metrics["rollout/fully_async/quarantined"] == 0


@pytest.mark.parametrize("masked", [False, True])
def test_partial_rollout_goes_on_from_the_tokens_it_has(host, server, caplog, masked):
    """Two tokens came before the host's update, six after it; only the latter are trained where off-policy ones are masked."""
    server.value.plan = [Run(partial=2), Run(partial=2)]
    results = []
    args = arguments(server, rollout_batch_size=1, partial_rollout=True, mask_offpolicy_in_partial_rollout=masked)
    source = DataSource()
    caller = threading.Thread(target=lambda: results.append(generate_rollout(args, 0, source)))
    caller.start()
    server.call(update_behind_our_back, server.value)
    caller.join()
    (output,) = results
    for sample in rows(output):
        assert sample.response_length == len(sample.rollout_log_probs) == 8
        assert sample.loss_mask == ([0, 0, 1, 1, 1, 1, 1, 1] if masked else None)
        assert sample.weight_versions == ["0", "7"]
    assert output.metrics["rollout/fully_async/requeued_server_abort"] == 0


def test_a_sample_that_the_host_s_buffer_had_begun_is_continued(host, server, caplog):
    """Samples as stock slime leaves them: aborted, with tokens, and older than all that are sampled now."""
    source = DataSource()
    taken = source.get_samples

    def begun(count):
        groups = taken(count)
        for sample in (sample for group in groups for sample in group):
            sample.tokens, sample.response, sample.response_length = [1, 2, 3, 101, 102], "old ", 2
            sample.rollout_log_probs = [-0.1, -0.2]
            sample.status = type(sample.status).ABORTED
        return groups

    source.get_samples = begun
    more = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    output = generate_rollout(arguments(server, rollout_batch_size=1, **more), 0, source)
    for sample in rows(output):
        assert sample.tokens[:5] == [1, 2, 3, 101, 102]
        assert len(sample.tokens) == 3 + 8
        assert sample.response.startswith("old ")
        assert sample.rollout_log_probs[:2] == [-0.1, -0.2]
        assert sample.loss_mask == [0, 0, 1, 1, 1, 1, 1, 1]


def test_a_group_s_timeout_frees_its_slot(host, seen, server, caplog):
    args = arguments(
        server,
        rollout_batch_size=1,
        rollout_group_timeout_s=0.2,
        custom_generate_function_path="user_functions.hang_first",
    )
    assert len(rows(generate_rollout(args, 0, DataSource()))) == 2
    assert "cleaned" in seen


@pytest.mark.parametrize(("given", "expected"), [(1800, 1800.0), (0, None), (-1, None), (2.5, 2.5)])
def test_the_timeout_s_values(given, expected):
    assert Arguments(Namespace(rollout_group_timeout_s=given)).group_timeout == expected


@pytest.mark.parametrize("given", ["None", "60", None, float("nan"), True])
def test_a_timeout_that_is_no_number_is_refused(given):
    with pytest.raises(SettingsError, match=r"--rollout-group-timeout-s: got .*the word None does not"):
        _ = Arguments(Namespace(rollout_group_timeout_s=given)).group_timeout


def config(**more):
    names = "stop stop_token_ids skip_special_tokens no_stop_trim repetition_penalty min_new_tokens input_key label_key"
    names += " metadata_key tool_key custom_rm_path custom_generate_function_path"
    defaults = dict.fromkeys(names.split())
    more = {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "max_response_len": 4,
        "n_samples_per_eval_prompt": 2,
        **more,
    }
    return Namespace(**{**defaults, "inject_metadata": lambda metadata: {**metadata, "injected": True}, **more})


def test_evaluation_runs_all_datasets_beside_production(host, seen, server, caplog):
    args = arguments(
        server,
        eval_datasets=[
            config(name="a", path="a", custom_generate_function_path="user_functions.generate_eval"),
            config(name="b", path="b", custom_rm_path="user_functions.reward"),
        ],
        eval_reward_key=None,
    )
    source = DataSource()
    generate_rollout(args, 0, source)
    output = generate_rollout(args, 0, source, evaluation=True)

    assert type(output).__name__ == "RolloutFnEvalOutput"
    for name in "ab":
        assert [sample.index for sample in output.data[name]["samples"]] == list(range(6))
        assert all(sample.metadata == {"injected": True} for sample in output.data[name]["samples"])
    assert output.data["a"]["rewards"] == [3.0] * 6
    assert output.data["a"]["truncated"] == [False] * 6
    assert output.data["b"]["truncated"] == [True] * 6
    assert output.metrics == {"eval/a-failed": 0, "eval/b-failed": 0}
    assert all(entry[3] is True and entry[2]["temperature"] == 0.5 for entry in seen if len(entry) == 4)


def test_other_args_for_the_same_data_source_are_refused(host, seen, server, caplog):
    source = DataSource()
    more = {"custom_generate_function_path": "user_functions.generate"}
    generate_rollout(arguments(server, **more), 0, source)
    generate_rollout(arguments(server, **more), 1, source)
    with pytest.raises(SettingsError, match=r"runs with other args; call close_engines"):
        generate_rollout(arguments(server, **more, rollout_temperature=0.1), 2, source)


@pytest.mark.parametrize("name", REFUSED)
def test_flags_that_would_be_ignored_are_refused(host, server, name):
    with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')}: "):
        generate_rollout(arguments(server, **{name: "given"}), 0, DataSource())


def test_every_argument_that_is_read_is_listed_with_its_default():
    """A test of the list itself: no other attribute can be read."""
    assert {
        "rollout_batch_size": REQUIRED,
        "n_samples_per_prompt": 1,
        "over_sampling_batch_size": None,
        "rollout_group_timeout_s": 1800.0,
        "rollout_infrastructure": (),
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": REQUIRED,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "rollout_seed": 42,
        "sglang_enable_deterministic_inference": False,
        "custom_generate_function_path": None,
        "custom_rm_path": None,
        "group_rm": False,
        "rm_type": None,
        "reward_key": None,
        "eval_reward_key": None,
        "dynamic_sampling_filter_path": None,
        "rollout_sample_filter_path": None,
        "hf_checkpoint": None,
        "rollout_external_engine_addrs": None,
        "sglang_router_ip": None,
        "sglang_router_port": None,
        "eval_datasets": None,
        "eval_max_prompt_len": None,
        "eval_min_new_tokens": None,
        "multimodal_keys": None,
        "apply_chat_template": False,
        "apply_chat_template_kwargs": None,
    } == ARGUMENTS
    with pytest.raises(AttributeError, match="not in the list of attributes that are read"):
        _ = Arguments(Namespace()).something_else


def test_the_parser_learns_the_names_of_infrastructure():
    parser = add_arguments(ArgumentParser())
    assert Arguments(parser.parse_args([])).retry == Retry()
    given = parser.parse_args(["--rollout-infrastructure", "e2b.SandboxException", "modal.Error"])
    assert Arguments(given).retry.infrastructure == (*Retry().infrastructure, "e2b.SandboxException", "modal.Error")
    with pytest.raises(SettingsError, match=r"infrastructure"):
        _ = Arguments(parser.parse_args(["--rollout-infrastructure", "SandboxException"])).retry


def test_the_parser_learns_the_timeout_flag(capsys):
    parser = add_arguments(ArgumentParser())
    assert parser.parse_args([]).rollout_group_timeout_s == 1800.0
    assert parser.parse_args(["--rollout-group-timeout-s", "-1"]).rollout_group_timeout_s == -1.0
    with pytest.raises(SystemExit):
        parser.parse_args(["--rollout-group-timeout-s", "None"])
    assert "0 or less means no timeout (the word None does not)" in capsys.readouterr().err


def test_deterministic_inference_seeds_each_sample_of_a_group():
    args = Arguments(Namespace(rollout_max_response_len=8, sglang_enable_deterministic_inference=True))
    assert [args.sampling(index)["sampling_seed"] for index in range(3)] == [42, 43, 44]


async def test_importing_the_adapter_does_not_import_slime():
    program = "import sys, trio_rollout_compat.slime; print('slime' in sys.modules)"
    answer = await trio.run_process([sys.executable, "-c", program], capture_stdout=True)
    assert answer.stdout == b"False\n"
