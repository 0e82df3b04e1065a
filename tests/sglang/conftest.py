"""Answers are decoded in two ways, and what holds must hold for both."""

import pytest

from trio_rollout.sglang._wire import decoding


@pytest.fixture(scope="module", params=["pure", "native"])
def decoder(request):
    """Run the test with each of the two decoders."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pure":
            patch.setattr(decoding, "cut", None)
        elif decoding.cut is None:
            pytest.skip("the C extension is not compiled; tests/sglang/test_native.py says so once")
        yield request.param
