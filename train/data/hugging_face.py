"""`--data hf:NAME[,CONFIG][:SPLIT]`: a data set of the hub, or a local folder, streamed by `datasets`.

Its shards are dealt to lanes, in another order in each epoch, and within a lane samples are shuffled in a
window (`--shuffle-window`, 1000). A shard knows its position, so that a resume reads nothing again but one
window of each lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckpttool.errors import Unreadable, UsageFault, install
from train.config.shared import DataConfig
from train.data.packing import Packed
from train.data.samples import Parts, Scale, scale_of
from train.data.stream import Stream

WINDOW = 1000
MOST_LANES = 12  # divides by 1 to 4 and 6 ranks; each lane holds one shard open
LABELS = ("label", "labels", "target", "fine_label", "class")


class HubShard:
    """One shard, made when it is first read: a data set may have thousands."""

    def __init__(self, whole: Any, number: int, of: int, as_sample: AsSample) -> None:
        self.whole, self.number, self.of, self.as_sample = whole, number, of, as_sample
        self.name = f"shard {number} of {of}"
        self._made: Any = None

    @property
    def made(self) -> Any:
        if self._made is None:
            self._made = self.whole.shard(num_shards=self.of, index=self.number)
        return self._made

    def __iter__(self) -> Iterator[Any]:
        return map(self.as_sample, self.made)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.made.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.made.load_state_dict(state)


class AsSample:
    """Makes a sample of a row: (image, label) for classification, else a dict of its columns."""

    def __init__(self, columns: tuple[str, str] | None, scale: Scale, resize: int | None) -> None:
        self.columns, self.scale, self.resize = columns, scale, resize

    def __call__(self, row: dict[str, Any]) -> Any:
        if self.columns is None:
            return {name: _as_tensor(value) for name, value in row.items()}
        inputs, label = (row[name] for name in self.columns)
        if hasattr(inputs, "convert"):  # Pillow's
            from train.data.builtin import pixels

            return self.scale.apply(pixels(inputs, self.resize)), int(label)
        return _as_tensor(inputs), int(label)


def _as_tensor(value: Any) -> Any:
    if hasattr(value, "convert"):
        from train.data.builtin import pixels

        return pixels(value, None)
    if isinstance(value, list):
        try:
            return torch.tensor(value)
        except (TypeError, ValueError):
            return value
    return value


def load(config: DataConfig, name: str, seed: int) -> Parts:
    """Return a split of a data set (by default `train`) as a stream of training samples."""
    try:
        import datasets
    except ImportError:
        raise UsageFault(f"--data hf:{name}: needs datasets", hint=install("hf")) from None
    where, _, split = name.partition(":")
    path, _, configuration = where.partition(",")
    split = split or "train"
    try:
        loaded = datasets.load_dataset(path, configuration or None, split=split, streaming=True)
        if loaded.features is None:
            loaded = loaded._resolve_features()
    except (OSError, ValueError) as error:  # of many classes, all of which are one of these
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unreadable(f"hf:{name}", why, hint="hf:OWNER/NAME,CONFIG:SPLIT, or hf:FOLDER") from error
    columns, classes = _columns(config, name, loaded) if config.task == "classification" else (None, ())
    as_sample = AsSample(columns, scale_of(config, channels=3), config.resize)
    number = loaded.num_shards
    shards: list[Any] = [HubShard(loaded, shard, number, as_sample) for shard in range(number)]
    if config.block_size:
        shards = [Packed(shard, config.block_size) for shard in shards]
    most = min(MOST_LANES, getattr(config, "batch_size", 1))
    known = (loaded.info.splits or {}).get(split)
    stream = Stream(
        shards,
        f"hf:{name}",
        seed=seed,
        lanes=next(lanes for lanes in range(most, 0, -1) if number % lanes == 0),
        shuffled=True,
        window=config.shuffle_window or WINDOW,
        skip_damaged=config.skip_damaged,
        length=known.num_examples or None if known and not config.block_size else None,
    )
    return Parts(stream, None, classes, f"hf {name}")


def _columns(config: DataConfig, name: str, loaded: Any) -> tuple[tuple[str, str], tuple[str, ...]]:
    """Return the columns of the inputs and the label, and the names of the classes."""
    features = loaded.features
    labels = [column for column, feature in features.items() if hasattr(feature, "names")]
    labels += [column for column in LABELS if column in features and column not in labels]
    images = [column for column, feature in features.items() if type(feature).__name__ == "Image"]
    inputs = images + [column for column in features if column not in labels and column not in images]
    if not labels or not inputs or not hasattr(features[labels[0]], "names"):
        what = f"--data hf:{name}: has no column of classes among {', '.join(features)}"
        hint = "--task names other tasks; file.py:factory may name the classes"
        raise UsageFault(what, hint=hint)
    return (inputs[0], labels[0]), tuple(map(str, features[labels[0]].names))
