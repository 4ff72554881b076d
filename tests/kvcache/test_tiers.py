"""Tiers alone: what they keep, for how long, and what they do with damaged files."""

import os
import random

import pytest

from ridgeline.core.encryption import Encryption
from ridgeline.core.errors import CorruptFileError, DiskError
from ridgeline.kvcache.tiers import DiskTier, Entry, EntryHeader, RamTier, decode_entry
from ridgeline.kvcache.tiers.entry import PREFIX_BYTES, digest, encode_entry


def make_entry(number: int, *, tenant: str = "t", size: int = 1000) -> Entry:
    kv = random.Random(number).randbytes(size)
    header = EntryHeader(
        key=number.to_bytes(32, "big"),
        root_key=b"r" * 32,
        uid=number.to_bytes(16, "big"),
        tenant=tenant,
        token_ids=(number, 2, 3),
        sizes=(size // 4, size - size // 4),
        kv_digest=digest(kv),
    )
    return Entry(header, kv)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["ram", "disk"])
def make_tier(request, tmp_path):
    def make(capacity=10**6, **settings):
        if request.param == "ram":
            return RamTier(capacity, **settings)
        return DiskTier(tmp_path / "kv", capacity, **settings)

    return make


def test_what_is_put_is_found_and_equal(make_tier):
    tier = make_tier()
    entries = [make_entry(number) for number in range(5)]
    for entry in entries:
        tier.put(entry)
        tier.put(entry)
    for entry in entries:
        key = entry.header.key
        assert tier.may_have(key)
        assert tier.get(key) == entry
        assert entry.of_group(0) + entry.of_group(1) == entry.kv
    assert tier.usage().num_entries == 5
    assert not tier.may_have(b"x" * 32)
    assert tier.get(b"x" * 32) is None


def test_the_least_recently_used_goes_first(make_tier):
    tier = make_tier(6000)
    for number in range(4):
        tier.put(make_entry(number))
    assert tier.get(make_entry(0).header.key)
    for number in range(4, 7):
        tier.put(make_entry(number))
        assert tier.usage().num_bytes <= 6000
    assert tier.may_have(make_entry(0).header.key)
    assert not tier.may_have(make_entry(1).header.key)
    assert tier.usage().num_evicted > 0
    tier.put(make_entry(9, size=7000))  # larger than all of it
    assert not tier.may_have(make_entry(9).header.key)


def test_a_tier_may_be_filled_to_its_last_byte(make_tier):
    tier = make_tier()
    for number in range(3):
        tier.put(make_entry(number))
    capacity = tier.usage().num_bytes
    tier.delete_tenant("t")
    tier = make_tier(capacity)
    for number in range(3):
        tier.put(make_entry(number))
    assert tier.get(make_entry(0).header.key) and tier.touch(make_entry(1).header.key)
    usage = tier.usage()
    assert (usage.num_entries, usage.num_bytes, usage.num_evicted) == (3, capacity, 0)
    tier.put(make_entry(3))
    assert [n for n in range(4) if tier.may_have(make_entry(n).header.key)] == [0, 1, 3]
    assert tier.usage().num_evicted == 1


def test_a_touch_is_a_use(make_tier):
    clock = Clock()
    tier = make_tier(6000, clock=clock)
    for number in range(4):
        tier.put(make_entry(number))
    assert tier.touch(make_entry(0).header.key)
    assert not tier.touch(make_entry(9).header.key)
    for number in range(4, 7):
        tier.put(make_entry(number))
    assert tier.may_have(make_entry(0).header.key)
    assert not tier.may_have(make_entry(1).header.key)


def test_the_disk_tier_knows_touches_after_a_restart(tmp_path):
    clock = Clock()
    tier = DiskTier(tmp_path, 10**6, clock=clock)
    for number in range(3):
        tier.put(make_entry(number))
    clock.now += 5
    assert tier.touch(make_entry(0).header.key)
    small = DiskTier(tmp_path, tier.usage().num_bytes // 3 + 1, clock=clock)
    assert small.may_have(make_entry(0).header.key)
    assert small.usage().num_entries == 1


def test_a_touch_of_a_file_that_another_process_removed(tmp_path):
    tier = DiskTier(tmp_path, 10**6)
    tier.put(make_entry(0))
    (path,) = tmp_path.glob("*/*.kv")
    path.unlink()
    assert not tier.touch(make_entry(0).header.key)
    assert tier.usage().num_entries == 0


def test_what_was_not_used_for_long_expires(make_tier):
    clock = Clock()
    tier = make_tier(ttl_s=10.0, clock=clock)
    tier.put(make_entry(0))
    tier.put(make_entry(1))
    clock.now += 6
    assert tier.get(make_entry(1).header.key)
    clock.now += 6
    assert tier.get(make_entry(0).header.key) is None
    assert tier.get(make_entry(1).header.key)


def test_a_tenants_entries_can_be_deleted(make_tier):
    tier = make_tier()
    for number in range(6):
        tier.put(make_entry(number, tenant="a/../../b" if number % 2 else ""))
    assert tier.delete_tenant("a/../../b")
    assert tier.delete_tenant("nobody")
    found = [tier.get(make_entry(number).header.key) is not None for number in range(6)]
    assert found == [True, False] * 3


def test_the_disk_tier_survives_a_restart(tmp_path):
    tier = DiskTier(tmp_path, 10**6)
    for number in range(3):
        tier.put(make_entry(number))
    size = tier.usage().num_bytes
    (tmp_path / "stray").write_text("not ours")
    half = next(tmp_path.glob("*/")) / "half.tmp"
    half.write_bytes(b"cut short")
    os.utime(half, (1.0, 1.0))
    other = tmp_path / "other"
    DiskTier(other, 10**6).put(make_entry(7))
    (theirs,) = other.iterdir()
    (tmp_path / "linked").symlink_to(theirs)  # neither is it followed, nor is what leads nowhere
    half.with_name(f"{make_entry(8).header.key.hex()}.kv").symlink_to("nowhere")
    again = DiskTier(tmp_path, 10**6)
    assert again.usage().num_entries == 4
    assert again.get(make_entry(8).header.key) is None
    assert again.usage().num_bytes == size
    assert all(again.get(make_entry(number).header.key) for number in range(3))
    assert not list(tmp_path.glob("*/*.tmp"))
    assert (tmp_path / "stray").exists()
    small = DiskTier(tmp_path, size // 3 + 1)
    assert small.usage().num_entries == 1


def test_files_are_private(tmp_path):
    tier = DiskTier(tmp_path / "kv", 10**6)
    tier.put(make_entry(0))
    for path in (tmp_path / "kv").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_is_a_miss(tmp_path, seed):
    rng = random.Random(seed)
    tier = DiskTier(tmp_path, 10**6)
    tier.put(make_entry(0))
    (path,) = tmp_path.glob("*/*.kv")
    data = bytearray(path.read_bytes())
    match rng.randrange(3):
        case 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            del data[rng.randrange(len(data)) :]
        case 2:
            data += b"more"
    path.write_bytes(data)
    assert tier.get(make_entry(0).header.key) is None
    assert tier.usage().num_failures == 1
    assert not path.exists()


@pytest.mark.parametrize("seed", range(20))
def test_damaged_headers_raise_one_kind_of_error(seed):
    rng = random.Random(seed)
    data = bytearray(encode_entry(make_entry(1)))
    for _ in range(50):
        copy = bytearray(data)
        copy[rng.randrange(PREFIX_BYTES + 100)] = rng.randrange(256)
        if copy != data:
            with pytest.raises(CorruptFileError):
                decode_entry(bytes(copy))


def test_a_full_disk_is_counted_and_nothing_breaks(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, 10**6)
    tier.put(make_entry(0))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", full)
        tier.put(make_entry(1))
    assert tier.usage().num_failures == 1
    assert not list(tmp_path.glob("*/*.tmp"))
    tier.put(make_entry(2))
    assert tier.get(make_entry(2).header.key)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="cannot hold KV blocks"):
        DiskTier(tmp_path / "file" / "kv", 100)


def test_what_another_process_removes_meanwhile_is_not_there(tmp_path, monkeypatch):
    path, scandir = tmp_path / "kv", os.scandir
    tier = DiskTier(path, 10**6)
    for number in range(4):
        tier.put(make_entry(number, tenant="ab"[number % 2]))

    def slow_scandir(folder):
        found = list(scandir(folder))
        os.rename(found[0], tmp_path / found[0].name)
        return found

    monkeypatch.setattr(os, "scandir", slow_scandir)
    assert DiskTier(path, 10**6).usage().num_entries == 1


@pytest.fixture
def encrypted(tmp_path):
    def make(key=b"k" * 32):
        return DiskTier(tmp_path, 10**6, encryption=Encryption(key))

    return make


def test_an_encrypted_tier_is_found_again_with_its_key_only(tmp_path, encrypted):
    entries = [make_entry(number, tenant="somebody", size=200_000) for number in range(2)]
    tier = encrypted()
    for entry in entries:
        tier.put(entry)
    assert tier.get(entries[0].header.key) == entries[0]
    assert encrypted().get(entries[1].header.key) == entries[1]
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("*/*.kv"))
    for plain in (entries[0].kv[:16], entries[1].kv[-16:], b"somebody", b"RLKV"):
        assert plain not in stored
    other_key, no_key = encrypted(b"x" * 32), DiskTier(tmp_path, 10**6)
    assert other_key.get(entries[0].header.key) is None
    assert no_key.get(entries[1].header.key) is None
    assert [tier.usage().num_failures for tier in (other_key, no_key)] == [1, 1]


def test_damaged_and_swapped_files_of_an_encrypted_tier_are_counted_misses(tmp_path, encrypted):
    def swap(a, b):
        first, second = a.read_bytes(), b.read_bytes()
        a.write_bytes(second)
        b.write_bytes(first)

    def flip(a, _):
        data = bytearray(a.read_bytes())
        data[-20] ^= 1
        a.write_bytes(data)

    for damage in (swap, flip, lambda a, _: os.truncate(a, a.stat().st_size - 16)):
        tier = encrypted()
        entries = [make_entry(number, size=200_000) for number in range(2)]
        for entry in entries:
            tier.put(entry)
        paths = [next(tmp_path.glob(f"*/{entry.header.key.hex()}.kv")) for entry in entries]
        damage(*paths)
        assert tier.get(entries[0].header.key) is None
        assert tier.usage().num_failures == 1
        assert not paths[0].exists()


def test_what_lies_unencrypted_in_an_encrypted_tier_is_removed_at_the_start(tmp_path, encrypted):
    plain = DiskTier(tmp_path, 10**6)
    plain.put(make_entry(0))
    tier = encrypted()
    assert tier.usage().num_entries == 0
    assert not list(tmp_path.glob("*/*.kv"))
