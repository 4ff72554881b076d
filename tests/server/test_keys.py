"""Whose a key is, and what a file of keys may say."""

import base64

import pytest
from tests.server.key_digests import digest

from ridgeline.core.errors import SettingsError
from ridgeline.server.config import ServerConfig
from ridgeline.server.keys import KeyRing


def test_keys_are_compared_in_constant_time(monkeypatch):
    """Every known key is compared, whichever matches."""
    compared = []
    monkeypatch.setattr(
        "ridgeline.server.keys.hmac.compare_digest", lambda a, b: compared.append(a) or a == b
    )
    keys = KeyRing(ServerConfig(api_key=("a", "b", "c")))
    for key in (b"a", b"c", b"nothing"):
        compared.clear()
        keys.caller({b"x-api-key": key})
        assert len(compared) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("key = 1", "key"),
        ("[[key]]\nname = 'a'", r"key\[0\]\.sha256: this field is required"),
        ("[[key]]\nname='a'\nsha256='zz'", "sha256: this must be 64 hexadecimal digits"),
        ("[[key]]\nname='a'\nconcurency=1", "did you mean 'concurrency'"),
        ("\0", "not as it should be"),
    ],
)
def test_a_bad_key_file_is_one_sentence(tmp_path, text, words):
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(SettingsError, match=f"key file.*{words}"):
        KeyRing(ServerConfig(api_key_file=str(tmp_path / "keys.toml")))


def test_priorities_of_keys_need_the_policy_that_goes_by_them(tmp_path):
    (tmp_path / "keys.toml").write_text(f"[[key]]\nname='a'\nsha256='{digest('')}'\npriority=-1")
    keys = KeyRing(ServerConfig(api_key_file=str(tmp_path / "keys.toml")))
    keys.check_policy("priority")
    with pytest.raises(SettingsError, match=r"--scheduling-policy priority"):
        keys.check_policy("edf")


def test_a_key_says_whose_it_is_and_only_the_admins_may_administer(tmp_path):
    file = tmp_path / "keys.toml"
    entry = f"[[key]]\nname='a'\nsha256='{digest('k')}'\nconcurrency=3"
    file.write_text(f"admin_sha256='{digest('root')}'\n{entry}")
    config = ServerConfig(api_key=("plain",), api_key_file=str(file), admin_api_key="boss")
    keys = KeyRing(config)
    owners = {
        "k": ("a", False),
        "plain": (f"key-{digest('plain')[:8]}", False),
        "root": ("admin", True),
        "boss": ("admin", True),
    }
    for key, (tenant, is_admin) in owners.items():
        caller = keys.caller({b"x-api-key": key.encode()})
        assert (caller.tenant, caller.is_admin) == (tenant, is_admin)
        assert keys.may_administer(caller) is is_admin and keys.has_tenant(tenant)
        assert caller.limits.concurrency == (3 if key == "k" else None)
    assert keys.caller({b"x-api-key": b"other"}) is None
    assert not keys.is_open and not keys.has_tenant("local")
    with pytest.raises(SettingsError, match="there twice"):
        KeyRing(ServerConfig(api_key=("k",), api_key_file=str(file)))


def test_where_there_is_no_key_everybody_is_one_tenant_that_may_administer():
    keys = KeyRing(ServerConfig())
    caller = keys.caller({})
    assert keys.is_open and caller.tenant == "local"
    assert keys.has_tenant("local") and not keys.has_tenant("a")
    assert keys.may_administer(caller)


@pytest.mark.parametrize(
    ("headers", "is_known"),
    [
        ({b"authorization": b"Bearer key"}, True),
        ({b"authorization": b"bearer  key "}, True),
        ({b"authorization": b"key"}, False),
        ({b"authorization": b"Token key"}, False),
        ({b"authorization": b"Basic " + base64.b64encode(b"me:key")}, True),
        ({b"authorization": b"Basic " + base64.b64encode(b"key")}, False),
        ({b"authorization": b"Basic me:key", b"x-api-key": b"key"}, False),
        ({b"authorization": b"Basic *" + base64.b64encode(b"me:key")}, False),
        ({b"authorization": b"Bearer key", b"x-api-key": b"key"}, True),
        ({b"authorization": b"Bearer key", b"x-api-key": b"other"}, False),
        ({b"x-api-key": b""}, False),
    ],
)
def test_a_key_comes_in_one_of_three_ways(headers, is_known):
    caller = KeyRing(ServerConfig(api_key=("key",))).caller(headers)
    assert (caller is not None) is is_known


@pytest.mark.parametrize("names", [("a", "a"), ("admin",), ("b", "local")])
def test_every_key_of_a_file_is_a_tenant_of_its_own(tmp_path, names):
    entries = [f"[[key]]\nname='{name}'\nsha256='{digest(str(i))}'" for i, name in enumerate(names)]
    (tmp_path / "keys.toml").write_text("\n".join(entries))
    with pytest.raises(SettingsError, match=rf"key file .*\b{names[-1]}\."):
        KeyRing(ServerConfig(api_key_file=str(tmp_path / "keys.toml")))
