"""The messages of an integration about a framework that it does not know."""

import re
from importlib import metadata

import pytest

from overlap_torch.integrations._release import require


@pytest.mark.parametrize("version", ["0.3", "0.3.0", "0.3.12+git1234567"])
def test_integration_takes_the_releases_that_it_knows(monkeypatch, version):
    asked = []
    monkeypatch.setattr(metadata, "version", lambda name: asked.append(name) or version)
    require("torchtitan", ("0.2", "0.3"), "extra")
    assert asked == ["torchtitan"]
    with pytest.raises(ImportError, match=f"torchtitan {re.escape(version)} is installed"):
        require("torchtitan", ("0.2",), "extra")


@pytest.mark.parametrize("version", ["0.4.0", "0.30.1", "0.0.0+unknown"])
def test_integration_refuses_other_releases(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", {"torchtitan": version}.__getitem__)
    with pytest.raises(ImportError) as error:
        require("torchtitan", ("0.2", "0.3"), "extra")
    message = str(error.value)
    assert f"torchtitan {version} is installed" in message
    assert "knows torchtitan 0.2.* or torchtitan 0.3.*" in message
    assert "in the checkout `pip install '.[extra]'`" in message


def test_integration_says_what_to_install():
    with pytest.raises(ImportError) as error:
        require("a-framework-that-nobody-has", ("1.2",), "extra")
    message = str(error.value)
    assert message.startswith("a-framework-that-nobody-has is not installed")
    assert "in the checkout `pip install '.[extra]'`" in message
