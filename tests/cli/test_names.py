"""Names of rewards and generate functions on the command line."""

import sys

import click
import pytest

from trio_rollout._core.sampling import SamplingParams
from trio_rollout._core.values import Prompt, Segment, Trajectory
from trio_rollout.cli._job import load_callable, resolve_generate, resolve_reward

SCORERS = """
import functools

def length(trajectory):
    return float(len(trajectory.text))

async def one(trajectory):
    return 1.0

class Judge:
    async def __call__(self, trajectory):
        return 2.0

    def shout(self, trajectory):
        return 3.0

judge = Judge()
part = functools.partial(one)
number = 7

async def generate(prompt, rollout):
    return prompt, rollout
"""


pytestmark = pytest.mark.usefixtures("scorers")


@pytest.fixture
def scorers(tmp_path, monkeypatch):
    """Write a module ``scorers`` in the current folder, as a user does."""
    (tmp_path / "scorers.py").write_text(SCORERS)
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "scorers", raising=False)


@pytest.fixture
def trajectory():
    """A trajectory whose answer and label are "four"."""
    segment = Segment(tokens=[1, 2], response_length=1, loss_mask=[1], log_probs=[-1.0], versions=[], text="four")
    return Trajectory(prompt=Prompt(id="p", text="2+2", label="four"), index=0, segments=[segment])


@pytest.mark.parametrize(
    ("name", "reward"),
    [
        ("scorers:length", 4.0),
        ("scorers:one", 1.0),
        ("scorers:judge", 2.0),
        ("scorers:judge.shout", 3.0),
        ("scorers:part", 1.0),
        ("exact_match", 1.0),
        ("regex:^f.*", 1.0),
    ],
)
async def test_a_reward_is_found_by_name_whether_sync_or_async(trajectory, name, reward):
    assert await resolve_reward(name)(trajectory) == reward


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "expected module:function"),
        (":length", "expected module:function"),
        ("scorers:", "expected module:function"),
        ("no_such_module:f", "can't import 'no_such_module'"),
        ("broken:f", "importing 'broken' failed: ZeroDivisionError"),
        ("scorers:lenght", "has no 'lenght'"),
        ("scorers:number", "a int is not callable"),
        ("regex:(", "is no regular expression"),
    ],
)
def test_an_unusable_reward_is_a_usage_error_that_says_why(name, message):
    with pytest.raises(click.BadParameter) as caught:
        resolve_reward(name)

    assert message in str(caught.value)


async def test_a_generate_function_gets_the_sampling_of_the_options():
    sampling = SamplingParams(max_new_tokens=5)
    generate = resolve_generate("scorers:generate", sampling)

    assert generate.sampling is sampling
    assert await generate("prompt", "rollout") == ("prompt", "rollout")


def test_a_generate_function_with_sampling_of_its_own_keeps_it():
    load_callable("scorers:generate").sampling = own = SamplingParams()

    assert resolve_generate("scorers:generate", SamplingParams(top_k=3)).sampling is own


def test_a_generate_function_must_be_async():
    with pytest.raises(click.BadParameter, match="must be async"):
        resolve_generate("scorers:length", SamplingParams())


@pytest.mark.parametrize("program", ["raise SystemExit(0)", "import asyncio; raise asyncio.CancelledError"])
def test_f101_a_module_that_exits_is_a_wrong_option(tmp_path, program):
    """Its exit status is not the command's: 0 would say that every group is scored."""
    (tmp_path / "leaves_at_once.py").write_text(program)
    with pytest.raises(click.BadParameter, match="importing 'leaves_at_once' failed: "):
        load_callable("leaves_at_once:score")
