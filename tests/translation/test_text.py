"""Files to pairs: what ends a line, which lines belong together, which bytes can be read."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from experiments.translation.text import clean, lines_of, read_lines, read_pair, read_table


def both(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.src", folder / f"{name}.tgt"


def test_t05_unequal_numbers_of_lines_are_refused_with_both_names_and_counts(cases: Path) -> None:
    """T05."""
    with pytest.raises(ValueError, match=r"short_side\.src has 12 lines and .*short_side\.tgt has 11;"):
        read_pair(*both(cases, "short_side"))


def test_t06_pairs_that_are_blank_on_a_side_are_left_out_together(
    cases: Path, report: pytest.LogCaptureFixture
) -> None:
    """T06: 3, 7, 10 and 12 of 12; the others keep their partner."""
    pairs = read_pair(*both(cases, "blank_lines"))
    assert pairs.skipped == (3, 7, 10, 12)
    assert list(pairs.lines) == [1, 2, 4, 5, 6, 8, 9, 11]
    assert len(pairs.source) == len(pairs.target) == 8
    fourth = list(pairs.lines).index(4)
    assert pairs.source[fourth].lower().startswith("the dog")
    assert pairs.target[fourth].startswith("der Hund")
    assert "4 of 12 pairs skipped" in report.text
    assert "lines 3, 7, 10, 12" in report.text


@pytest.mark.parametrize("other", ["crlf", "no_final_newline"])
def test_t07_line_ends_change_nothing(cases: Path, other: str) -> None:
    """T07."""
    ours, theirs = read_pair(*both(cases, "clean")), read_pair(*both(cases, other))
    assert len(ours.source) == 12
    assert (ours.source, ours.target) == (theirs.source, theirs.target)


def test_t08_a_byte_that_cannot_be_read_is_named(cases: Path) -> None:
    """T08: file, line and byte, and the option that cures it."""
    with pytest.raises(ValueError, match=r"latin1\.tgt, line 4: byte 0xE4 .*\n.*--data\.target_encoding="):
        read_pair(*both(cases, "latin1"))
    ours, right = read_pair(*both(cases, "latin1"), "utf-8", "latin-1"), read_pair(*both(cases, "clean"))
    assert (ours.source, ours.target) == (right.source, right.target)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("one\ntwo\n".encode("utf-16"), r"x is text in utf-16.*--data\.encoding=utf-16"),
        ("one\ntwo\n".encode("utf-16-be"), r"x holds zero bytes.*--data\.encoding=utf-16-be"),
        (b"PK\x03\x04\x14\x00", r"x is no text but a zip archive, as \.xlsx, \.docx"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_what_is_no_such_text_is_called_what_it_is(data: bytes, message: str, encoding: str) -> None:
    with pytest.raises(ValueError, match=message):
        lines_of(data, "x", encoding)


def test_text_in_utf_16_is_read_where_its_encoding_is_given() -> None:
    assert lines_of("one\ntwö\n".encode("utf-16"), "x", "utf-16") == ["one", "twö"]
    assert lines_of("one\ntwö\n".encode("utf-16-le"), "x", "utf-16-le") == ["one", "twö"]


def test_only_line_feeds_end_a_line() -> None:
    odd = "a\u2028b\u2029c\x0bd\x0ce\x1cf\x85g\rh"
    assert lines_of(f"{odd}\nnext\r\nlast".encode(), "x") == [odd, "next", "last"]
    assert lines_of(b"", "x") == []
    assert lines_of(b"\n\na", "x") == ["", "", "a"]


def test_the_same_text_in_other_bytes(tmp_path: Path) -> None:
    """Byte order mark, compression (whatever the name), UTF-16."""
    text = "Größe\r\nzwei\n"
    forms = {
        "plain.txt": (text.encode(), "utf-8"),
        "mark.de": (b"\xef\xbb\xbf" + text.encode(), "utf-8"),
        "packed.de.gz": (gzip.compress(text.encode()), "utf-8"),
        "misnamed.de": (gzip.compress(text.encode()), "utf-8"),
        "wide.de": (text.encode("utf-16"), "utf-16"),
        "big.de": (text.encode("utf-16-be"), "utf-16-be"),
    }
    for name, (data, encoding) in forms.items():
        (tmp_path / name).write_bytes(data)
        assert read_lines(tmp_path / name, encoding) == ["Größe", "zwei"], name


def test_damaged_compression_and_unknown_encodings_are_named(tmp_path: Path) -> None:
    whole = gzip.compress(b"a line\n" * 100)
    for data in (whole[:-9], whole[:20] + b"\0\0\0" + whole[23:]):
        with pytest.raises(ValueError, match=r"x\.gz is compressed by gzip and damaged"):
            lines_of(data, "x.gz")
    with pytest.raises(ValueError, match=r"--data\.encoding=latin9000: there is no such encoding"):
        lines_of(b"a", "x", "latin9000")
    with pytest.raises(ValueError, match=r"--mine=rot13: there is no such encoding"):
        lines_of(b"a", "x", "rot13", "--mine")


def test_the_line_of_a_bad_byte_is_right_in_wide_encodings() -> None:
    data = "eins\nzwei\n".encode("utf-16-le") + b"\x00\xd8" + "!".encode("utf-16-le")
    with pytest.raises(ValueError, match=r"x, line 3: byte 0x00"):
        lines_of(data, "x", "utf-16-le")


def test_text_that_looks_the_same_is_the_same() -> None:
    assert clean("Scho\u0308n") == "Sch\u00f6n"
    assert clean("\u3000a\u00a0 b\t\x85c\u2028 ") == "a b c"
    # Compatibility forms look different, and stay.
    assert clean("ﬁ ½ ｱ") == "ﬁ ½ ｱ"


def test_nothing_but_blank_lines_is_refused(tmp_path: Path) -> None:
    for name, text in (("a", " \n\n"), ("b", "x\n\n"), ("empty", "")):
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"a with b holds no pairs \(2 blank lines\)"):
        read_pair(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match=r"holds no pairs"):
        read_pair(tmp_path / "empty", tmp_path / "empty")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "t.tsv"
    path.write_bytes(b'a "b\tx\tby 1\r\n\r\nc\ty\tby 2\n\tz\tby 3\nd\tw\n')
    return path


def test_a_table_is_source_then_target(table: Path, report: pytest.LogCaptureFixture) -> None:
    pairs = read_table(table, ("en", "de"))
    assert pairs.source == ['a "b', "c", "d"]
    assert pairs.target == ["x", "y", "w"]
    assert (pairs.skipped, list(pairs.lines)) == ((2, 4), [1, 3, 5])
    assert "2 of 5 pairs skipped" in report.text


def test_columns_are_found_by_name(table: Path, tmp_path: Path) -> None:
    right = read_table(table, ("en", "de"))
    swapped = read_table(table, ("de", "en"), ["en", "de", "by"])
    assert (swapped.source, swapped.target) == (right.target, right.source)
    headed = tmp_path / "headed.tsv"
    headed.write_bytes(b"\xef\xbb\xbfde\tby\ten\r\nx\t1\ta\n")
    found = read_table(headed, ("en", "de"))
    assert (found.source, found.target, list(found.lines)) == (["a"], ["x"], [2])


def test_tables_that_do_not_fit_are_refused_by_line(table: Path) -> None:
    with pytest.raises(ValueError, match=r"t\.tsv, line 5 has 2 column\(s\), 'd w'; expected 3 or more"):
        read_table(table, ("en", "by"), ["en", "de", "by"])
    with pytest.raises(ValueError, match=r"--data\.columns names en, de; expected en and fr among them"):
        read_table(table, ("en", "fr"), ["en", "de"])
    table.write_text("one two\n")
    with pytest.raises(ValueError, match=r"t\.tsv, line 1 has 1 column\(s\), 'one two'; expected 2 or more"):
        read_table(table, ("en", "de"))


def test_a_header_without_one_of_the_languages_is_no_pair(tmp_path: Path) -> None:
    """Else the columns that stand first would be trained on, whatever they hold."""
    path = tmp_path / "train.tsv"
    path.write_text("id\ten\tde\n1\tone\teins\n")
    with pytest.raises(ValueError, match=r"line 1, names id, en, de; expected fr and de"):
        read_table(path, ("fr", "de"))
