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
from cutslots.data.tfrecord import LARGEST, Broken, checksum, parse_example, read_records
from tests.data.small_files import boundaries, frame, framed, write_records

MiB = 2**20
RNG = random.Random(0)
CONTENTS = [RNG.randbytes(n) for n in (0, 1, 300, 11, 5000, 70)]
RECORDS = [frame(content) for content in CONTENTS]
PLAIN = b"".join(RECORDS)
PACKED = gzip.compress(PLAIN, mtime=12345)
FORMS = pytest.mark.parametrize("data", [PLAIN, PACKED], ids=["plain", "packed"])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("records") / "some.tfrecords"


def read(path, data):
    """The records that can be read, and the sentence on why there are no more, if there is one."""
    path.write_bytes(data)
    found = []
    try:
        for record in read_records(path):
            found.append(record)
    except Broken as error:
        said = str(error)
        assert said.startswith(str(path)) and "\n" not in said
        return found, said.removeprefix(f"{path} ")
    return found, None


def peak(path, data):
    """The most bytes that Python held while the file was read to its end or to its fault."""
    path.write_bytes(data)
    del data
    tracemalloc.start()
    try:
        with contextlib.suppress(Broken):
            for _ in read_records(path):
                pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def head(length):
    """The start of a record that claims to be so long, with a checksum that fits."""
    said = length.to_bytes(8, "little")
    return said + TFRecordWriter.masked_crc(said)


# ------------------------------------------------------------------------------------------------------------- records


@FORMS
def test_records_come_back_in_order(path, data):
    assert read(path, data) == (CONTENTS, None)


def test_checksums_are_the_other_writers(path):
    for content in CONTENTS:
        assert checksum(content).to_bytes(4, "little") == TFRecordWriter.masked_crc(content)


def test_what_the_other_writer_writes(tmp_path):
    writer = TFRecordWriter(str(tmp_path / "a.tfrecords"))
    for i in range(3):
        writer.write({"number": (i, "int"), "text": ([b"a" * i], "byte")})
    writer.close()
    found = [parse_example(record) for record in read_records(tmp_path / "a.tfrecords")]
    assert [f["number"].ints().tolist() for f in found] == [[0], [1], [2]]
    assert [f["text"].strings() for f in found] == [[b""], [b"a"], [b"aa"]]


def test_several_gzip_members_are_one_file(path):
    assert read(path, b"".join(gzip.compress(record) for record in RECORDS)) == (CONTENTS, None)


def test_a_plain_file_may_start_with_gzips_mark(path):
    """A length of 0x8b1f is written 1f 8b: the checksum of the length tells."""
    content = bytes(0x8B1F)
    assert frame(content)[:2] == b"\x1f\x8b" == PACKED[:2]
    assert read(path, frame(content)) == ([content], None)


def test_an_empty_file(path):
    assert read(path, b"") == ([], "is empty; expected a TFRecord file")


def test_another_kind_of_file(path):
    found, said = read(path, b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert found == [] and said.startswith("is damaged at record 0: its length does not fit its checksum")


# -------------------------------------------------------------------------------------------------------------- faults


def test_a_plain_file_cut_anywhere(path):
    """Between two records it is a shorter file; elsewhere the record that is cut is named."""
    ends = boundaries(RECORDS)
    cuts = {cut for end in ends for cut in (end - 1, end, end + 1)} | {RNG.randrange(len(PLAIN)) for _ in range(100)}
    for cut in sorted(cut for cut in cuts if 0 < cut < len(PLAIN)):
        whole = max(i for i, end in enumerate(ends) if end <= cut)
        expected = None if cut in ends else f"ends early: record {whole} is cut short"
        assert read(path, PLAIN[:cut]) == (CONTENTS[:whole], expected), cut


def test_a_packed_file_cut_anywhere(path):
    cuts = {1, 2, 3, 9, 10, 11, *range(len(PACKED) - 12, len(PACKED)), *range(0, len(PACKED), 37)} - {0}
    for cut in sorted(cuts):
        found, said = read(path, PACKED[:cut])
        assert found == CONTENTS[: len(found)], cut
        assert said == f"ends early: record {len(found)} is cut short", cut


@FORMS
@settings(max_examples=300, deadline=None)
@given(where=st.integers(0, 2**32), bit=st.integers(0, 7))
@example(where=4, bit=0)  # gzip's time of writing: nothing is lost
def test_a_flipped_bit_is_noticed_or_harmless(path, data, where, bit):
    flipped = bytearray(data)
    flipped[where % len(data)] ^= 1 << bit
    found, said = read(path, bytes(flipped))
    assert found == CONTENTS[: len(found)]
    if said is None:
        assert found == CONTENTS
    else:
        assert re.match(rf"(is damaged at|ends early:) record {len(found)}\b", said)


def test_gzips_time_of_writing_does_not_matter(path):
    flipped = bytearray(PACKED)
    flipped[4:8] = b"\xff\xff\xff\xff"
    assert read(path, bytes(flipped)) == (CONTENTS, None)


@pytest.mark.parametrize("more", [b"x", b"something else entirely, long enough for a head", RECORDS[2][:-1]])
@FORMS
def test_something_after_the_last_record(path, data, more):
    found, said = read(path, data + more)
    assert found == CONTENTS and re.match(r"(is damaged at|ends early:) record 6\b", said)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "packed"])
@pytest.mark.parametrize("length", [LARGEST + 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
def test_lengths_beyond_reason(path, length, pack):
    found, said = read(path, pack(RECORDS[2] + head(length) + bytes(50)))
    assert found == [CONTENTS[2]]
    assert said == f"is damaged at record 1: it says that it has {length:,} bytes; expected at most 67,108,864"


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "packed"])
@pytest.mark.parametrize("length", [51, 1000, LARGEST])
def test_lengths_that_lie(path, length, pack):
    data = pack(RECORDS[2] + head(length) + bytes(50))
    assert read(path, data) == ([CONTENTS[2]], "ends early: record 1 is cut short")
    assert peak(path, data) < 2 * MiB


def test_memory_is_that_of_a_record(path):
    """However long the file is: two records and their pieces at once, not forty."""
    data = frame(bytes(MiB)) * 40
    assert peak(path, data) < 6 * MiB
    assert peak(path, gzip.compress(data, 1)) < 6 * MiB


def test_a_bomb_is_no_larger_than_the_largest_record(path, monkeypatch):
    monkeypatch.setattr(tfrecord, "LARGEST", 16 * MiB)
    at_most = 1.25 * 16 * MiB + 2 * MiB
    honest = gzip.compress(frame(bytes(16 * MiB)))
    assert len(honest) < 20_000
    assert peak(path, gzip.compress(head(2**62) + bytes(64 * MiB), 1)) < 2 * MiB, "its length is refused"
    assert peak(path, gzip.compress(bytes(64 * MiB), 1)) < 2 * MiB, "nothing fits"
    assert peak(path, gzip.compress(head(16 * MiB) + bytes(15 * MiB), 1)) < at_most, "it ends early"
    assert peak(path, honest) < at_most, "it is as long as it says"


# ---------------------------------------------------------------------------------------------------------------- fuzz


@settings(max_examples=200, deadline=None)
@given(
    data=st.binary(max_size=200), prefix=st.sampled_from([b"", b"\x1f\x8b", b"\x1f\x8b\x08", PLAIN[:12], RECORDS[2]])
)
def test_any_bytes(path, data, prefix):
    found, said = read(path, prefix + data)
    assert said is not None or found == [CONTENTS[2]] or not found
    read(path, gzip.compress(prefix + data))


@settings(max_examples=200, deadline=None)
@given(
    start=st.sampled_from([PLAIN, PACKED]),
    changes=st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 40), st.binary(max_size=20)), max_size=4),
)
def test_valid_files_with_parts_replaced(path, start, changes):
    data = start
    for where, length, new in changes:
        at = where % (len(data) + 1)
        data = data[:at] + new + data[at + length :]
    found, _ = read(path, data)
    assert all(record in CONTENTS for record in found)


def take_apart(record):
    """Asks every feature for all that it could be; what comes out is of the right type."""
    with contextlib.suppress(Broken):
        for name, feature in parse_example(record).items():
            assert isinstance(name, str)
            for ask in (feature.strings, feature.octets, feature.floats, feature.ints):
                with contextlib.suppress(Broken):
                    assert isinstance(ask(), list | np.ndarray)


def varint(value):
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number, content, wire=2):
    """A field of a message: a length and its content, a number, or 4 or 8 bytes as they are."""
    tag = varint(number << 3 | wire)
    return tag + {0: lambda: varint(content), 2: lambda: varint(len(content)) + content}.get(wire, lambda: content)()


BLOBS = st.one_of(st.binary(max_size=12), st.integers(0, 2**64 - 1).map(varint))
FIELDS = st.one_of(
    st.builds(field, st.integers(0, 4), st.integers(0, 2**64 - 1), st.just(0)),
    st.builds(field, st.integers(0, 4), BLOBS),
    st.builds(field, st.integers(0, 4), BLOBS, st.integers(1, 7)),  # often not what the wire type says
    st.builds(lambda n, length: varint(n << 3 | 2) + varint(length), st.integers(1, 3), st.integers(0, 2**64 - 1)),
)


def inside(fields):
    return st.builds(lambda n, parts: field(n, b"".join(parts)), st.integers(1, 3), st.lists(fields, max_size=3))


FEATURES = inside(inside(FIELDS))


@settings(max_examples=200, deadline=None)
@given(record=st.one_of(st.binary(max_size=60), FEATURES, FEATURES.map(lambda x: field(1, field(1, field(2, x))))))
def test_hostile_examples_with_checksums_that_fit(path, record):
    assert read(path, frame(record)) == ([record], None)
    take_apart(record)


VALID = framed({"a": ([b"x", b"yy"], "byte"), "b": ([1.5, -2.0], "float"), "c": ([1, -1, 2**40], "int")})[12:-4]


@settings(max_examples=200, deadline=None)
@given(where=st.integers(0, len(VALID) - 1), length=st.integers(0, 5), new=st.binary(max_size=5))
def test_examples_with_parts_replaced(where, length, new):
    take_apart(VALID[:where] + new + VALID[where + length :])


def test_examples_cut_anywhere():
    for cut in range(len(VALID)):
        take_apart(VALID[:cut])


def test_examples_take_memory_of_their_size():
    """Views of the record are handed out; a length that lies takes nothing."""
    record = field(1, field(1, field(1, b"a") + field(2, field(1, b"\x0a\x01x" * MiB))))
    for hostile in (record, field(1, varint(1 << 3 | 2) + varint(2**62)), record[:-1], record[:100]):
        tracemalloc.start()
        with contextlib.suppress(Broken):
            assert len(parse_example(hostile)["a"].octets()) == MiB
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
    """Our reading against protobuf's."""
    ours = parse_example(record)
    assert set(ours) == set(theirs.features.feature)
    for name, feature in theirs.features.feature.items():
        kind = feature.WhichOneof("kind")
        assert KINDS[ours[name].kind] == kind
        if kind == "bytes_list":
            values = list(feature.bytes_list.value)
            assert ours[name].strings() == values
            if all(len(value) == 1 for value in values):
                assert ours[name].octets().tobytes() == b"".join(values)
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
    """A list by hand: packed into one field, a field for each, or some of both."""
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
    """Lists packed or not, fields in another order, fields that nobody knows, features in several messages."""
    extra = field(15, 3, 0) + field(16, b"12345678", 1) + field(17, b"?") + field(18, b"1234", 5) if unknown else b""
    entries = []
    for name, (kind, values) in features.items():
        content = field(KINDS.index(kind), encoded(kind, values, packed)) if kind else b""
        key, value = field(1, name.encode()), field(2, extra + content)
        entries.append(field(1, value + key if unknown else key + value))
    messages = [field(1, entry) for entry in entries] if apart else [field(1, extra + b"".join(entries))]
    record = extra + b"".join(messages)
    assert_same(record, example_pb2.Example.FromString(record))


def test_of_two_features_of_one_name_the_last_is_read():
    twice = b"".join(field(1, field(1, b"a") + field(2, field(1, field(1, x)))) for x in (b"first", b"second"))
    record = field(1, twice)
    assert parse_example(record)["a"].strings() == [b"second"]
    assert_same(record, example_pb2.Example.FromString(record))


def test_an_empty_record_has_no_features():
    assert parse_example(b"") == {}
    assert example_pb2.Example.FromString(b"") == example_pb2.Example()


def test_a_feature_is_asked_for_what_it_is_not():
    found = parse_example(VALID)
    for name, ask, said in [
        ("a", "floats", "a feature holds byte strings, not floats"),
        ("a", "ints", "a feature holds byte strings, not whole numbers"),
        ("b", "strings", "a feature holds floats, not byte strings"),
        ("c", "octets", "a feature holds whole numbers, not byte strings"),
    ]:
        with pytest.raises(Broken, match=f"^{said}$"):
            getattr(found[name], ask)()
    nothing = parse_example(field(1, field(1, field(1, b"a") + field(2, b""))))
    with pytest.raises(Broken, match=r"^a feature holds nothing, not floats$"):
        nothing["a"].floats()


@pytest.mark.parametrize("values", [[b"ab"], [b""], [b"a", b"", b"bc"], [b"a", b"bcd"], [b"\x0a\x01a"]])
def test_single_bytes_are_single(values):
    record = framed({"a": (values, "byte")})[12:-4]
    with pytest.raises(Broken, match="a list that should be of single bytes is not"):
        parse_example(record)["a"].octets()


def test_floats_keep_their_bits():
    values = [0.0, -0.0, math.inf, -math.inf, 1e-45, 3.4e38]
    found = parse_example(framed({"a": (values, "float")})[12:-4])["a"].floats()
    assert found.tobytes() == np.array(values, dtype=np.float32).tobytes()


def test_write_records_is_what_the_reader_reads(tmp_path):
    for packed in (False, True):
        file = write_records(tmp_path / "a", RECORDS, packed)
        assert list(read_records(file)) == CONTENTS
