import contextlib
import gzip
import math
import random
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tfrecord import example_pb2
from tfrecord.writer import TFRecordWriter

from cutslots.data import tfrecord
from cutslots.data.tfrecord import MAX_RECORD_BYTES, DamagedFile, checksum, parse_example, read_records
from tests.data.small_files import boundaries, frame, framed, write_records

MiB = 2**20
RNG = random.Random(0)
CONTENTS = [RNG.randbytes(n) for n in (0, 1, 300, 11, 5000, 70)]
RECORDS = [frame(content) for content in CONTENTS]
PLAIN = b"".join(RECORDS)
COMPRESSED = gzip.compress(PLAIN, mtime=12345)
FORMS = pytest.mark.parametrize("data", [PLAIN, COMPRESSED], ids=["plain", "compressed"])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("records") / "some.tfrecords"


def read(path, data):
    """Return the records before the first damaged one, and the error message, None if there is none."""
    path.write_bytes(data)
    found = []
    try:
        for record in read_records(path):
            found.append(record)
    except DamagedFile as error:
        message = str(error)
        assert message.startswith(str(path)) and "\n" not in message
        return found, message.removeprefix(f"{path} ")
    return found, None


def peak(path, data):
    """Return the peak memory in bytes while the file is read to its end or its first damaged record."""
    path.write_bytes(data)
    del data
    tracemalloc.start()
    try:
        with contextlib.suppress(DamagedFile):
            for _ in read_records(path):
                pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def header(length):
    """Return the start of a record of so many bytes, with a valid checksum."""
    data = length.to_bytes(8, "little")
    return data + TFRecordWriter.masked_crc(data)


# ------------------------------------------------------------------------------------------------------------- records


@FORMS
def test_records_come_back_in_order(path, data):
    assert read(path, data) == (CONTENTS, None)


def test_checksums_match_the_tfrecord_package(path):
    for content in CONTENTS:
        assert checksum(content).to_bytes(4, "little") == TFRecordWriter.masked_crc(content)


def test_reads_files_of_the_tfrecord_package(tmp_path):
    writer = TFRecordWriter(str(tmp_path / "a.tfrecords"))
    for i in range(3):
        writer.write({"number": (i, "int"), "text": ([b"a" * i], "byte")})
    writer.close()
    found = [parse_example(record) for record in read_records(tmp_path / "a.tfrecords")]
    assert [f["number"].ints().tolist() for f in found] == [[0], [1], [2]]
    assert [f["text"].strings() for f in found] == [[b""], [b"a"], [b"aa"]]


def test_several_gzip_members_are_one_file(path):
    assert read(path, b"".join(gzip.compress(record) for record in RECORDS)) == (CONTENTS, None)


def test_uncompressed_file_may_start_with_the_magic_number_of_gzip(path):
    """A length of 0x8b1f is stored as 1f 8b; the checksum of the length decides."""
    content = bytes(0x8B1F)
    assert frame(content)[:2] == b"\x1f\x8b" == COMPRESSED[:2]
    assert read(path, frame(content)) == ([content], None)


def test_empty_file_is_refused(path):
    assert read(path, b"") == ([], "is empty; expected a TFRecord file")


def test_file_of_another_format_is_refused(path):
    found, message = read(path, b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert found == [] and message.startswith("is damaged at record 0: its length does not match its checksum")


# -------------------------------------------------------------------------------------------------------------- damage


def test_truncated_uncompressed_file(path):
    """Truncation between two records gives a shorter file; elsewhere the error names the truncated record."""
    ends = boundaries(RECORDS)
    cuts = {cut for end in ends for cut in (end - 1, end, end + 1)} | {RNG.randrange(len(PLAIN)) for _ in range(100)}
    for cut in sorted(cut for cut in cuts if 0 < cut < len(PLAIN)):
        whole = max(i for i, end in enumerate(ends) if end <= cut)
        expected = None if cut in ends else f"ends early: record {whole} is truncated"
        assert read(path, PLAIN[:cut]) == (CONTENTS[:whole], expected), cut


def test_truncated_compressed_file(path):
    cuts = {1, 2, 3, 9, 10, 11, *range(len(COMPRESSED) - 12, len(COMPRESSED)), *range(0, len(COMPRESSED), 37)} - {0}
    for cut in sorted(cuts):
        found, message = read(path, COMPRESSED[:cut])
        assert found == CONTENTS[: len(found)], cut
        assert message == f"ends early: record {len(found)} is truncated", cut


@FORMS
@settings(max_examples=300, deadline=None)
@given(where=st.integers(0, 2**32), bit=st.integers(0, 7))
@example(where=4, bit=0)  # gzip's modification time: no effect
def test_flipped_bit_is_detected_or_has_no_effect(path, data, where, bit):
    flipped = bytearray(data)
    flipped[where % len(data)] ^= 1 << bit
    found, message = read(path, bytes(flipped))
    assert found == CONTENTS[: len(found)]
    if message is None:
        assert found == CONTENTS
    else:
        assert re.match(rf"(is damaged at|ends early:) record {len(found)}\b", message)


def test_modification_time_of_gzip_has_no_effect(path):
    flipped = bytearray(COMPRESSED)
    flipped[4:8] = b"\xff\xff\xff\xff"
    assert read(path, bytes(flipped)) == (CONTENTS, None)


@pytest.mark.parametrize("more", [b"x", b"some other text, long enough for a header", RECORDS[2][:-1]])
@FORMS
def test_bytes_after_the_last_record_are_an_error(path, data, more):
    found, message = read(path, data + more)
    assert found == CONTENTS and re.match(r"(is damaged at|ends early:) record 6\b", message)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "compressed"])
@pytest.mark.parametrize("length", [MAX_RECORD_BYTES + 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
def test_length_above_the_maximum(path, length, pack):
    found, message = read(path, pack(RECORDS[2] + header(length) + bytes(50)))
    assert found == [CONTENTS[2]]
    assert message == f"is damaged at record 1: its length is {length:,} bytes; expected at most 67,108,864"


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "compressed"])
@pytest.mark.parametrize("length", [51, 1000, MAX_RECORD_BYTES])
def test_length_beyond_the_end_of_the_file(path, length, pack):
    data = pack(RECORDS[2] + header(length) + bytes(50))
    assert read(path, data) == ([CONTENTS[2]], "ends early: record 1 is truncated")
    assert peak(path, data) < 2 * MiB


def test_memory_does_not_grow_with_the_file(path):
    """At most two records and their chunks are in memory, not forty."""
    data = frame(bytes(MiB)) * 40
    assert peak(path, data) < 6 * MiB
    assert peak(path, gzip.compress(data, 1)) < 6 * MiB


def test_decompression_bomb_takes_limit_the_largest_record(path, monkeypatch):
    monkeypatch.setattr(tfrecord, "MAX_RECORD_BYTES", 16 * MiB)
    limit = 1.25 * 16 * MiB + 2 * MiB
    valid = gzip.compress(frame(bytes(16 * MiB)))
    assert len(valid) < 20_000
    assert peak(path, gzip.compress(header(2**62) + bytes(64 * MiB), 1)) < 2 * MiB, "the length is refused"
    assert peak(path, gzip.compress(bytes(64 * MiB), 1)) < 2 * MiB, "the checksum of the length is wrong"
    assert peak(path, gzip.compress(header(16 * MiB) + bytes(15 * MiB), 1)) < limit, "the file ends early"
    assert peak(path, valid) < limit, "the record is complete"


# ---------------------------------------------------------------------------------------------------------------- fuzz


@settings(max_examples=200, deadline=None)
@given(
    data=st.binary(max_size=200), prefix=st.sampled_from([b"", b"\x1f\x8b", b"\x1f\x8b\x08", PLAIN[:12], RECORDS[2]])
)
def test_arbitrary_bytes(path, data, prefix):
    found, message = read(path, prefix + data)
    assert message is not None or found == [CONTENTS[2]] or not found
    read(path, gzip.compress(prefix + data))


@settings(max_examples=200, deadline=None)
@given(
    start=st.sampled_from([PLAIN, COMPRESSED]),
    changes=st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 40), st.binary(max_size=20)), max_size=4),
)
def test_valid_files_with_replaced_bytes(path, start, changes):
    data = start
    for where, length, new in changes:
        at = where % (len(data) + 1)
        data = data[:at] + new + data[at + length :]
    found, _ = read(path, data)
    assert all(record in CONTENTS for record in found)


def decode_all(record):
    """Decode every feature as every kind; check the types of the results."""
    with contextlib.suppress(DamagedFile):
        for name, feature in parse_example(record).items():
            assert isinstance(name, str)
            for decode in (feature.strings, feature.single_bytes, feature.floats, feature.ints):
                with contextlib.suppress(DamagedFile):
                    assert isinstance(decode(), list | np.ndarray)


def varint(value):
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number, content, wire=2):
    """Encode a field of a message: a length and its content, an integer, or 4 or 8 raw bytes."""
    tag = varint(number << 3 | wire)
    return tag + {0: lambda: varint(content), 2: lambda: varint(len(content)) + content}.get(wire, lambda: content)()


BLOBS = st.one_of(st.binary(max_size=12), st.integers(0, 2**64 - 1).map(varint))
FIELDS = st.one_of(
    st.builds(field, st.integers(0, 4), st.integers(0, 2**64 - 1), st.just(0)),
    st.builds(field, st.integers(0, 4), BLOBS),
    st.builds(field, st.integers(0, 4), BLOBS, st.integers(1, 7)),  # mostly invalid for the wire type
    st.builds(lambda n, length: varint(n << 3 | 2) + varint(length), st.integers(1, 3), st.integers(0, 2**64 - 1)),
)


def inside(fields):
    return st.builds(lambda n, parts: field(n, b"".join(parts)), st.integers(1, 3), st.lists(fields, max_size=3))


FEATURES = inside(inside(FIELDS))


@settings(max_examples=200, deadline=None)
@given(record=st.one_of(st.binary(max_size=60), FEATURES, FEATURES.map(lambda x: field(1, field(1, field(2, x))))))
def test_malformed_examples_with_valid_checksums(path, record):
    assert read(path, frame(record)) == ([record], None)
    decode_all(record)


VALID = framed({"a": ([b"x", b"yy"], "byte"), "b": ([1.5, -2.0], "float"), "c": ([1, -1, 2**40], "int")})[12:-4]


@settings(max_examples=200, deadline=None)
@given(where=st.integers(0, len(VALID) - 1), length=st.integers(0, 5), new=st.binary(max_size=5))
def test_examples_with_replaced_bytes(where, length, new):
    decode_all(VALID[:where] + new + VALID[where + length :])


def test_truncated_examples():
    for cut in range(len(VALID)):
        decode_all(VALID[:cut])


def test_decoding_allocates_no_more_than_the_record():
    """Features are views of the record; a wrong length allocates nothing."""
    record = field(1, field(1, field(1, b"a") + field(2, field(1, b"\x0a\x01x" * MiB))))
    for malformed in (record, field(1, varint(1 << 3 | 2) + varint(2**62)), record[:-1], record[:100]):
        tracemalloc.start()
        with contextlib.suppress(DamagedFile):
            assert len(parse_example(malformed)["a"].single_bytes()) == MiB
        assert tracemalloc.get_traced_memory()[1] < 2 * len(record)
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------------------------ Examples


INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=32)
LISTS = st.one_of(
    st.tuples(st.just("bytes_list"), st.lists(st.binary(max_size=5), max_size=5)),
    st.tuples(st.just("float_list"), st.lists(FLOATS, max_size=5)),
    st.tuples(st.just("int64_list"), st.lists(INTS, max_size=5)),
    st.tuples(st.none(), st.just([])),
)
EXAMPLES = st.dictionaries(st.text(max_size=6), LISTS, max_size=5)
KINDS = (None, "bytes_list", "float_list", "int64_list")


def assert_same(record, theirs):
    """Compare with protobuf's parser."""
    ours = parse_example(record)
    assert set(ours) == set(theirs.features.feature)
    for name, feature in theirs.features.feature.items():
        kind = feature.WhichOneof("kind")
        assert KINDS[ours[name].kind] == kind
        if kind == "bytes_list":
            values = list(feature.bytes_list.value)
            assert ours[name].strings() == values
            if all(len(value) == 1 for value in values):
                assert ours[name].single_bytes().tobytes() == b"".join(values)
        elif kind == "float_list":
            expected = np.array(feature.float_list.value, dtype=np.float32)
            assert np.array_equal(ours[name].floats(), expected, equal_nan=True)
        elif kind == "int64_list":
            assert ours[name].ints().dtype == np.int64
            assert ours[name].ints().tolist() == list(feature.int64_list.value)


@settings(max_examples=80, deadline=None)
@given(EXAMPLES)
def test_reads_what_protobuf_writes(features):
    made = example_pb2.Example()
    for name, (kind, values) in features.items():
        feature = made.features.feature[name]
        if kind:
            getattr(feature, kind).SetInParent()
            getattr(feature, kind).value.extend(values)
    assert_same(made.SerializeToString(), made)


def encoded(kind, values, packed):
    """Encode a list: packed into one field, as a field for each value, or half of each."""
    wire, one = {
        "bytes_list": (2, bytes),
        "float_list": (5, lambda value: np.float32(value).tobytes()),
        "int64_list": (0, varint),
    }[kind]
    if kind == "bytes_list" or packed == "none":
        return b"".join(field(1, value if wire == 0 else one(value), wire) for value in values)
    half = len(values) // 2 if packed == "some" else len(values)
    return field(1, b"".join(one(value) for value in values[:half])) + encoded(kind, values[half:], "none")


@settings(max_examples=80, deadline=None)
@given(EXAMPLES, st.sampled_from(["all", "some", "none"]), st.booleans(), st.booleans())
def test_reads_every_encoding_that_protobuf_reads(features, packed, unknown, apart):
    """Lists packed or not, fields in another order, unknown fields, features in several messages."""
    extra = field(15, 3, 0) + field(16, b"12345678", 1) + field(17, b"?") + field(18, b"1234", 5) if unknown else b""
    entries = []
    for name, (kind, values) in features.items():
        content = field(KINDS.index(kind), encoded(kind, values, packed)) if kind else b""
        key, value = field(1, name.encode()), field(2, extra + content)
        entries.append(field(1, value + key if unknown else key + value))
    messages = [field(1, entry) for entry in entries] if apart else [field(1, extra + b"".join(entries))]
    record = extra + b"".join(messages)
    assert_same(record, example_pb2.Example.FromString(record))


def test_last_feature_of_a_name_wins():
    twice = b"".join(field(1, field(1, b"a") + field(2, field(1, field(1, x)))) for x in (b"first", b"second"))
    record = field(1, twice)
    assert parse_example(record)["a"].strings() == [b"second"]
    assert_same(record, example_pb2.Example.FromString(record))


def test_empty_record_has_no_features():
    assert parse_example(b"") == {}
    assert example_pb2.Example.FromString(b"") == example_pb2.Example()


def test_wrong_kind_of_feature():
    found = parse_example(VALID)
    for name, method, message in [
        ("a", "floats", "a feature holds byte strings; expected floats"),
        ("a", "ints", "a feature holds byte strings; expected integers"),
        ("b", "strings", "a feature holds floats; expected byte strings"),
        ("c", "single_bytes", "a feature holds integers; expected byte strings"),
    ]:
        with pytest.raises(DamagedFile, match=f"^{message}$"):
            getattr(found[name], method)()
    empty = parse_example(field(1, field(1, field(1, b"a") + field(2, b""))))
    with pytest.raises(DamagedFile, match=r"^a feature holds nothing; expected floats$"):
        empty["a"].floats()


@pytest.mark.parametrize("values", [[b"ab"], [b""], [b"a", b"", b"bc"], [b"a", b"bcd"], [b"\x0a\x01a"]])
def test_single_bytes_refuse_other_lengths(values):
    record = framed({"a": (values, "byte")})[12:-4]
    with pytest.raises(DamagedFile, match="it has strings of other lengths; expected single bytes"):
        parse_example(record)["a"].single_bytes()


def test_floats_are_bit_exact():
    values = [0.0, -0.0, math.inf, -math.inf, 1e-45, 3.4e38]
    found = parse_example(framed({"a": (values, "float")})[12:-4])["a"].floats()
    assert found.tobytes() == np.array(values, dtype=np.float32).tobytes()


def test_write_records_round_trip(tmp_path):
    for packed in (False, True):
        file = write_records(tmp_path / "a", RECORDS, packed)
        assert list(read_records(file)) == CONTENTS
