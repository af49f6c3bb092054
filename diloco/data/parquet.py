"""Documents in a column of Parquet files."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diloco.common.errors import ConfigError, DataError

# Documents that are decoded at a time.
ROWS = 64


def groups_of(path: str, column: str) -> tuple[int, ...]:
    """Bytes of each row group of a file that has the column.

    Raises:
        DataError: it is no Parquet file, or the column is missing or no text.
    """
    with _damage_told(path, f"{path!r} is not a Parquet file"), _opened(path) as file:
        schema = file.schema_arrow
        if column not in schema.names:
            raise DataError(
                f"{path!r} has no column {column!r}; it has {', '.join(schema.names)}",
                hint="name the column that has the documents: --field NAME",
            )
        kind = schema.field(column).type
        if getattr(kind, "value_type", kind) not in _text_types():
            raise DataError(
                f"the column {column!r} of {path!r} holds {kind}, not text",
                hint="name the column that has the documents: --field NAME",
            )
        metadata = file.metadata
        return tuple(
            metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)
        )


def column_values(path: str, column: str, start: int, stop: int) -> Iterator[tuple[str, int]]:
    """The texts of row groups [start, stop), each with its bytes; nothing stands for "".

    Raises:
        DataError: the file is damaged.
    """
    what = f"row groups {start} to {stop - 1} of {path!r} cannot be read"
    with _damage_told(path, what), _opened(path) as file:
        groups = list(range(start, stop))
        for batch in file.iter_batches(ROWS, row_groups=groups, columns=[column]):
            for value in batch.column(0).to_pylist():
                text = value or ""
                yield text, len(text)


@contextmanager
def _damage_told(path: str, what: str) -> Iterator[None]:
    """Say which file it is that the library cannot read.

    Raises:
        ConfigError: the library is not installed.
        DataError: the file is damaged.
    """
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path!r} is a Parquet file, and pyarrow is not installed",
            hint="pip install 'diloco[arrow]'",
        ) from error
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the machine, not of what is in the file
        raise DataError(f"{what}: {error}", hint="copy the file again, or leave it out") from error


def _opened(path: str) -> Any:
    from pyarrow import parquet

    # Pages as they are needed: a row group may be larger than memory.
    return parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)


def _text_types() -> tuple[Any, ...]:
    import pyarrow as pa

    return (pa.string(), pa.large_string(), pa.string_view())
