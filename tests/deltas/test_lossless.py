"""A delta makes of its base what the newer checkpoint was, to the last bit, whatever is in the two."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch
from safetensors.torch import save_file

import ckpttool
from ckpttool.deltas import encoding, reading
from ckpttool.deltas.writing import Delta
from ckpttool.errors import Damaged, Refused
from tests.support.comparing import assert_same
from tests.support.every_format import training, with_objects
from tests.support.running import Cli
from tests.support.trees import KINDS, PLAIN_DTYPES, save_kind

digest = import_module("ckpttool.core.files.digest")
pytestmark = pytest.mark.usefixtures("here")


def through_a_delta(base: str, new: str, out: str) -> Delta:
    """Write a delta, apply it, and compare digests; return what was written."""
    made = ckpttool.delta(base, new, "d.safetensors", force=True)
    with ckpttool.apply(base, ["d.safetensors"]) as checkpoint:
        ckpttool.save(checkpoint, out, force=True)
    return made


def reloaded(path: str) -> Any:
    return torch.load(path, weights_only=False)


def assert_lossless(base: object, new: object) -> Delta:
    """Save two trees, and compare what torch loads of the second with what a delta makes of the first."""
    torch.save(base, "base.pt")
    torch.save(new, "new.pt")
    made = through_a_delta("base.pt", "new.pt", "out.pt")
    assert_same(reloaded("new.pt"), reloaded("out.pt"))
    return made


def of_dtype(name: str, seed: int, count: int = 4000) -> torch.Tensor:
    """Return any bits at all as a tensor: NaNs with payloads, infinities, −0.0."""
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    raw = raw % 2 if name == "bool" else raw
    size = torch.empty(0, dtype=getattr(torch, name)).element_size()
    return raw[: count - count % size].view(getattr(torch, name))


@pytest.mark.filterwarnings("ignore:BComplex32 support is experimental:UserWarning")
@pytest.mark.parametrize("name", [name for name in PLAIN_DTYPES if hasattr(torch, name)])
def test_any_bits_of_any_dtype(name: str) -> None:
    base = {key: of_dtype(name, seed) for seed, key in enumerate(("same", "few", "many", "other"))}
    new = {key: tensor.clone() for key, tensor in base.items()}
    new["few"].view(torch.uint8)[48:52] = 1
    new["many"].view(torch.uint8)[::16] ^= 1
    new["other"] = of_dtype(name, 9)
    assert_lossless(base, new)


@settings(max_examples=20)
@given(
    st.lists(st.sampled_from(["float32", "bfloat16", "int64", "uint8"]), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_changes_of_any_size_at_any_place(tmp_path_factory: Any, dtypes: list[str], seed: int) -> None:
    folder = tmp_path_factory.mktemp("any")
    random = torch.Generator().manual_seed(seed)
    base, new = {}, {}
    for number, name in enumerate(dtypes):
        count = int(torch.randint(0, 5000, (), generator=random))
        base[f"{number}"] = of_dtype(name, seed + number, count)
        raw = base[f"{number}"].clone().view(torch.uint8)
        changed = torch.rand(len(raw), generator=random) < 10 ** -float(torch.rand((), generator=random) * 4)
        new[f"{number}"] = torch.where(changed, raw ^ 5, raw).view(base[f"{number}"].dtype)
    for name, state in (("base", base), ("new", new)):
        save_file(state, folder / f"{name}.safetensors")
    files = [str(folder / f"{name}.safetensors") for name in ("base", "new", "d", "out")]
    ckpttool.delta(files[0], files[1], files[2], force=True)
    with ckpttool.apply(files[0], files[2:3]) as checkpoint:
        ckpttool.save(checkpoint, files[3], force=True)
    assert Path(files[3]).read_bytes() == Path(files[1]).read_bytes()


def test_a_tensor_of_many_blocks_that_ends_within_one() -> None:
    base = {"w": torch.randn(3_000_001).bfloat16()}
    new = {"w": base["w"].clone()}
    new["w"][::100] += 1
    new["w"][700_000:1_300_000] = base["w"][700_000:1_300_000]  # a whole block that is the base's
    assert assert_lossless(base, new).kinds["xor"] == 1


def changed(tree: Any) -> Any:
    """Return a copy of a training checkpoint after a step."""
    new = copy.deepcopy(tree)
    for tensor in new["model"].values():
        if tensor.is_floating_point():
            tensor.data += 1e-3
    return {**new, "epoch": 4, "more": {"x": torch.ones(3)}}


@pytest.mark.parametrize("make", [training, with_objects])
def test_a_training_checkpoint_with_ties_views_and_objects(make: Callable[[], Any]) -> None:
    assert_lossless(make(), changed(make()))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "masked"])
def test_tensors_that_are_not_plain(kind: str) -> None:
    save_kind(kind, Path("new.pt"))
    torch.save({"plain": torch.zeros(3, 4)}, "base.pt")
    through_a_delta("base.pt", "new.pt", "out.pt")
    assert ckpttool.verify("out.pt", against="new.pt").ok


def test_names_and_order_that_change() -> None:
    base = {"a": torch.ones(3), "b": torch.ones(4), "c.x": torch.ones(2)}
    new = {"c": {"x": torch.ones(2)}, "b": torch.ones(4), 3: torch.ones(1), "d": [torch.ones(3)]}
    assert_lossless(base, new)
    assert_lossless(new, base)


def test_ties_that_appear_and_disappear() -> None:
    w = torch.randn(10, 10)
    tied, apart = {"a": w, "b": w, "v": w[2]}, {"a": w.clone(), "b": w.clone(), "v": w[2].clone()}
    assert_lossless(tied, apart)
    assert_lossless(apart, tied)


def test_equal_values_in_other_layouts_types_and_shapes() -> None:
    w = torch.randn(8, 6, 3, 3)
    base = {"a": w, "b": w, "c": w.clone(), "d": torch.ones(4), "e": w.clone()}
    new = {
        "a": w.to(memory_format=torch.channels_last),
        "b": w.permute(1, 0, 2, 3),
        "c": w.reshape(48, 9),
        "d": torch.ones(4, dtype=torch.float64),
        "e": w.expand(2, 8, 6, 3, 3),
    }
    assert_lossless(base, new)
    assert_lossless(new, base)


def test_lazy_signs() -> None:
    z = torch.randn(64, dtype=torch.complex64)
    assert_lossless({"a": z, "b": torch.ones(64)}, {"a": z.conj(), "b": z.conj().imag.clone()})
    assert_lossless({"a": z.imag.clone()}, {"a": torch._neg_view(z.imag.clone())})


def test_empty_and_scalar_tensors() -> None:
    base = {"e": torch.zeros(0, 3), "f": torch.zeros(0), "s": torch.tensor(1.5), "t": torch.tensor(1)}
    new = {"e": torch.zeros(3, 0), "f": torch.zeros(0), "s": torch.tensor(-0.0), "t": torch.tensor(1)}
    assert_lossless(base, new)
    assert_lossless({}, new)
    assert_lossless(base, {})
    assert assert_lossless(base, base).kinds == {"same": 4, "sparse": 0, "xor": 0, "new": 0}


def test_zero_and_minus_zero_differ() -> None:
    made = assert_lossless({"w": torch.zeros(1000)}, {"w": torch.full((1000,), -0.0)})
    assert made.kinds["same"] == 0


@pytest.mark.parametrize("base", ["base.pt", "base.safetensors", "base/", "full.safetensors"])
def test_the_base_may_have_another_format_than_at_the_time(base: str) -> None:
    state = {f"layer.{i}.weight": torch.randn(40, 40) for i in range(4)}
    torch.save({"model": state, "epoch": 1, "optimizer": {"state": {0: torch.ones(7)}}}, "base.pt")
    new = {name: tensor + (torch.rand(40, 40) < 0.01) for name, tensor in state.items()}
    save_file(new, "new.safetensors")
    ckpttool.convert("base.pt", "base.safetensors")
    ckpttool.convert("base.pt", "full.safetensors", full=True)
    ckpttool.convert("base.pt", "base/", shard_size=10_000)
    ckpttool.delta("base.pt", "new.safetensors", "d.safetensors")
    with ckpttool.apply(base, ["d.safetensors"]) as checkpoint:
        ckpttool.save(checkpoint, "out.safetensors")
    assert Path("out.safetensors").read_bytes() == Path("new.safetensors").read_bytes()


def test_what_full_keeps_is_kept_in_a_file_of_tensors() -> None:
    torch.save({"model": {"w": torch.ones(3)}, "lr": 0.1}, "base.pt")
    torch.save({"model": {"w": torch.ones(3)}, "lr": 0.2, "args": argparse.Namespace(a=1)}, "new.pt")
    for name in ("base", "new"):
        ckpttool.convert(f"{name}.pt", f"{name}.safetensors", full=True)
    through_a_delta("base.safetensors", "new.safetensors", "out.safetensors")
    assert Path("out.safetensors").read_bytes() == Path("new.safetensors").read_bytes()


def test_metadata_of_safetensors() -> None:
    save_file({"w": torch.ones(3)}, "base.safetensors")
    save_file({"w": torch.ones(3)}, "new.safetensors", metadata={"step": "3 ü\n"})
    through_a_delta("base.safetensors", "new.safetensors", "out.safetensors")
    assert Path("out.safetensors").read_bytes() == Path("new.safetensors").read_bytes()


def test_between_folders_of_shards() -> None:
    state = {f"w{i}": torch.randn(50, 50) for i in range(6)}
    for number, folder in enumerate(("base/", "new/")):
        torch.save({name: tensor + number * (tensor > 2) for name, tensor in state.items()}, "all.pt")
        ckpttool.convert("all.pt", folder, shard_size=20_000, force=True)
    ckpttool.delta("base", "new", "d.safetensors")
    with ckpttool.apply("base", ["d.safetensors"]) as checkpoint:
        ckpttool.save(checkpoint, "out/", shard_size=20_000)
    files = {path.name: path.read_bytes() for path in Path("new").iterdir()}
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == files


def test_code_that_a_file_holds_is_refused_by_name() -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), "new.pt")
    torch.save({"w": torch.ones(1)}, "base.pt")
    with pytest.raises(ckpttool.errors.Refused, match=r"new\.pt: holds what a delta can't"):
        ckpttool.delta("base.pt", "new.pt", "d.safetensors")
    assert not Path("d.safetensors").exists()


@pytest.mark.parametrize("out", ["out.safetensors", "out.pt", "out/"])
def test_the_command_makes_a_result_once(step: Path, cli: Cli, monkeypatch: MonkeyPatch, out: str) -> None:
    for module in (digest, encoding):
        monkeypatch.setattr(module, "PIECE", 1 << 20)  # so that a tensor has several
    ckpttool.delta("base.safetensors", "new.safetensors", "d.safetensors")
    made: list[tuple[str, int]] = []
    for kind in (reading.Xored, reading.Patched):
        counted(monkeypatch, kind, made)
    assert cli("apply", "base.safetensors", "d.safetensors", out).code == 0
    assert sorted(made) == [("sparse", 0), ("sparse", 1), ("xor", 0), ("xor", 1)]
    assert ckpttool.digest(out) == ckpttool.digest("new.safetensors")


def test_a_chain_makes_each_link_once(cli: Cli, monkeypatch: MonkeyPatch) -> None:
    state = torch.randn(2000).bfloat16()
    save_file({"w": state}, "0.safetensors")
    names = ["0.safetensors"]
    for number in range(1, 7):
        state = state * torch.where(torch.rand(2000) < 0.5, 1.5, 1.0).bfloat16()
        save_file({"w": state}, "new.safetensors")
        ckpttool.delta("+".join(names), "new.safetensors", f"d{number}.safetensors")
        names.append(f"d{number}.safetensors")
    made: list[tuple[str, int]] = []
    for kind in (reading.Xored, reading.Patched):
        counted(monkeypatch, kind, made)
    assert cli("apply", *names, "out.safetensors").code == 0
    assert len(made) == 6
    made.clear()
    assert cli("convert", "+".join(names), "again.safetensors").code == 0
    assert len(made) == 6
    assert Path("out.safetensors").read_bytes() == Path("new.safetensors").read_bytes()


def counted(monkeypatch: MonkeyPatch, kind: type[Any], made: list[tuple[str, int]]) -> None:
    """Note each block that is made."""
    make = kind.make

    def noted(self: Any, number: int, out: memoryview) -> None:
        made.append((self.name, number))
        make(self, number, out)

    monkeypatch.setattr(kind, "make", noted)


@pytest.mark.parametrize("names", [("bad.pt", "new.pt"), ("base.pt", "bad.pt")], ids=["base", "new"])
@pytest.mark.parametrize("layout", [None, "vllm"])
def test_neither_side_may_be_damaged(layout: str | None, names: tuple[str, str], here: Path) -> None:
    for name, number in (("base.pt", 1.0), ("new.pt", 2.0)):
        torch.save({"w": torch.full((300, 300), number), "same": torch.ones(300)}, name)
    for name in ("base.pt", "new.pt"):
        if name not in names:
            raw = bytearray(Path(name).read_bytes())
            raw[len(raw) // 2] ^= 1  # in the middle of w
            Path("bad.pt").write_bytes(raw)
    with pytest.raises(Damaged, match=r"bad\.pt: the bytes of 'w' do not match their checksum"):
        ckpttool.delta(*names, "d.safetensors", layout=layout)
    assert not Path("d.safetensors").exists()
    ckpttool.delta(*names, "d.safetensors", layout=layout, verify=False)


@pytest.mark.parametrize("view", ["halves", "transposed", "gaps", "conjugate"])
@pytest.mark.parametrize("names", [("bad.pt", "new.pt"), ("base.pt", "bad.pt")], ids=["base", "new"])
@pytest.mark.parametrize("layout", [None, "vllm"])
def test_nor_may_a_storage_that_views_show(
    layout: str | None, names: tuple[str, str], view: str, here: Path
) -> None:
    for name, number in (("base.pt", 1.0), ("new.pt", 2.0)):
        whole = torch.full((300, 300), number, dtype=torch.cfloat if view == "conjugate" else None)
        whole[150] = 3.0
        views = {
            "halves": {"w": whole[:150], "v": whole[150:]},
            "transposed": {"w": whole.t()},
            "gaps": {"w": whole[::150, ::150]},
            "conjugate": {"w": whole.conj()},
        }
        torch.save(views[view], name)
    ckpttool.delta("base.pt", "new.pt", "good.safetensors", layout=layout)
    for name in ("base.pt", "new.pt"):
        if name not in names:
            raw = bytearray(Path(name).read_bytes())
            raw[len(raw) // 2] ^= 1
            Path("bad.pt").write_bytes(raw)
    with pytest.raises(Damaged, match=r"bad\.pt: the bytes of '.*' do not match their checksum"):
        ckpttool.delta(*names, "d.safetensors", layout=layout)
    assert not Path("d.safetensors").exists()
    ckpttool.delta(*names, "d.safetensors", layout=layout, verify=False)


def test_a_patch_refuses_a_type_that_it_lacks_by_name(here: Path) -> None:
    for name in ("base.pt", "new.pt"):
        torch.save({"w": torch.rand(3, dtype=torch.complex128)}, name)
    with pytest.raises(Refused, match=r"new\.pt: 'w' is complex128, a type that such patches lack"):
        ckpttool.delta("base.pt", "new.pt", "d.safetensors", layout="vllm")


@pytest.mark.parametrize("name", ["x.delta.pt", "x.gguf"])
def test_an_output_that_ends_as_another_format_is_refused_with_the_name_to_use(
    name: str, tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"w": torch.zeros(2)}, tmp_path / "b.pt")
    with pytest.raises(ckpttool.errors.UsageFault, match="is a file of safetensors") as caught:
        ckpttool.delta(tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / name)
    assert str(caught.value.hint).endswith(f"{name.rpartition('.')[0]}.safetensors")
    assert not (tmp_path / name).exists()
    assert ckpttool.delta(tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "x").saved.nbytes


@pytest.mark.parametrize("missing", ["a.pt", "nope.delta.safetensors"])
def test_of_a_sum_of_files_the_one_that_is_missing_is_named(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "b.pt")
    name = f"{missing}+b.pt" if missing == "a.pt" else f"b.pt+{missing}"
    with pytest.raises(ckpttool.errors.Unreadable) as caught:
        ckpttool.open(name)
    assert caught.value.message == f"{missing}: no such file"
