"""Continue the event file of a run that goes on, so that the run has one, however often it was restarted."""

import struct
from pathlib import Path
from typing import Any

from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.event_file_writer import EventFileWriter, _AsyncWriter
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import FileWriter, SummaryWriter
from typing_extensions import override

_HEADER, _FOOTER_BYTES = struct.Struct("<QI"), 4


class ContinuingWriter(SummaryWriter):
    """torch's writer, which continues the newest event file of its directory, if there is one."""

    @override
    def _get_file_writer(self) -> Any:
        earlier = sorted(Path(self.log_dir).glob("events.out.tfevents.*"))  # as TensorBoard reads them
        if earlier and not vars(self).get("file_writer"):
            self.file_writer = _Continued(earlier[-1], self.max_queue, self.flush_secs)
            self.all_writers = {str(self.log_dir): self.file_writer}
        return super()._get_file_writer()

    @property
    def continues(self) -> bool:
        """Whether the file has events of an earlier process."""
        return isinstance(self._get_file_writer(), _Continued)


class _Continued(FileWriter):
    def __init__(self, file: Path, max_queue: int, flush_secs: int) -> None:
        self.event_writer = _Appending(file, max_queue, flush_secs)


class _Appending(EventFileWriter):
    def __init__(self, file: Path, max_queue: int, flush_secs: int) -> None:
        self._logdir = str(file.parent)
        self._file_name = str(file)
        with open(file, "r+b") as existing:  # what follows a record that is torn can't be read
            existing.truncate(end_of_records(existing))
        self._general_file_writer = open(file, "ab")  # noqa: SIM115  # closed by the writer
        self._async_writer = _AsyncWriter(RecordWriter(self._general_file_writer), max_queue, flush_secs)


def end_of_records(file: Any) -> int:
    """Find, in bytes, the end of the last record of an event file, opened in binary mode, that is whole."""
    size, end = file.seek(0, 2), 0
    while True:
        file.seek(end)
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return end
        length, check = _HEADER.unpack(header)
        following = end + _HEADER.size + length + _FOOTER_BYTES
        if following > size or check != masked_crc32c(header[:8]):
            return end
        end = following
