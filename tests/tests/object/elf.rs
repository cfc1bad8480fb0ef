//! Just enough of a 64-bit little-endian ELF file: its sections, its symbols, and where calls between functions go.

use anyhow::{Context, Result, ensure};

/// Types of symbols.
pub(crate) const UNTYPED: u8 = 0;
/// A map, a global.
pub(crate) const DATA: u8 = 1;
/// A program, a function.
pub(crate) const FUNCTION: u8 = 2;

/// Bytes of a symbol and of a relocation.
const SYMBOL: usize = 24;
const RELOCATION: usize = 16;

/// The file.
pub(crate) struct Elf<'a> {
    file: &'a [u8],
    sections: Vec<Section<'a>>,
}

struct Section<'a> {
    name: &'a str,
    /// Where it begins in the file.
    offset: usize,
    data: &'a [u8],
}

/// A symbol: its name, its type, and where it lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Symbol<'a> {
    pub(crate) name: &'a str,
    pub(crate) kind: u8,
    /// The section's number.
    pub(crate) section: usize,
    /// The offset in the section, in bytes.
    pub(crate) value: usize,
    /// The length in bytes.
    pub(crate) size: usize,
}

impl<'a> Elf<'a> {
    pub(crate) fn read(file: &'a [u8]) -> Result<Self> {
        ensure!(
            file.starts_with(b"\x7fELF\x02\x01"),
            "the object is no 64-bit little-endian ELF file"
        );
        let headers = number::<8>(file, 0x28)? as usize;
        let (size, count) = (number::<2>(file, 0x3a)? as usize, number::<2>(file, 0x3c)? as usize);
        let names_index = number::<2>(file, 0x3e)? as usize;
        let bounds = |index: usize| -> Result<(usize, usize)> {
            let at = headers + index * size;
            Ok((
                number::<8>(file, at + 0x18)? as usize,
                number::<8>(file, at + 0x20)? as usize,
            ))
        };
        let slice = |index| -> Result<&'a [u8]> {
            let (at, len) = bounds(index)?;
            // A section without content has an offset all the same.
            Ok(file.get(at..at + len).unwrap_or_default())
        };
        let names = slice(names_index)?;
        let mut sections = Vec::new();
        for index in 0..count {
            sections.push(Section {
                name: text(names, number::<4>(file, headers + index * size)? as usize)?,
                offset: bounds(index)?.0,
                data: slice(index)?,
            });
        }
        Ok(Self { file, sections })
    }

    pub(crate) fn section(&self, name: &str) -> Option<&'a [u8]> {
        self.sections
            .iter()
            .find(|section| section.name == name)
            .map(|section| section.data)
    }

    /// The content of a section, by its number.
    pub(crate) fn content(&self, index: usize) -> Result<&'a [u8]> {
        Ok(self.sections.get(index).context("no such section")?.data)
    }

    /// Where a symbol lies in the file.
    pub(crate) fn place(&self, symbol: &Symbol<'_>) -> Result<usize> {
        let section = self.sections.get(symbol.section).context("no such section")?;
        Ok(section.offset + symbol.value)
    }

    /// All symbols, in the order of their numbers.
    pub(crate) fn symbols(&self) -> Result<Vec<Symbol<'a>>> {
        ensure!(!self.file.is_empty(), "an empty file has no symbols");
        let table = self.section(".symtab").context("no symbols")?;
        let names = self.section(".strtab").context("no names")?;
        table
            .chunks_exact(SYMBOL)
            .map(|symbol| {
                Ok(Symbol {
                    name: text(names, number::<4>(symbol, 0)? as usize)?,
                    kind: symbol[4] & 0xf,
                    section: number::<2>(symbol, 6)? as usize,
                    value: number::<8>(symbol, 8)? as usize,
                    size: number::<8>(symbol, 16)? as usize,
                })
            })
            .collect()
    }

    /// Names of the symbols of a type.
    pub(crate) fn names(&self, kind: u8) -> Result<Vec<&'a str>> {
        let symbols = self.symbols()?.into_iter();
        Ok(symbols.filter(|s| s.kind == kind).map(|s| s.name).collect())
    }

    /// The number of the symbol that the place in a section is relocated against.
    pub(crate) fn relocation(&self, section: usize, offset: usize) -> Result<Option<usize>> {
        let name = format!(".rel{}", self.sections.get(section).context("no such section")?.name);
        for entry in self.section(&name).unwrap_or_default().chunks_exact(RELOCATION) {
            if number::<8>(entry, 0)? as usize == offset {
                return Ok(Some(number::<4>(entry, 12)? as usize));
            }
        }
        Ok(None)
    }
}

/// The little-endian number of `N` bytes at an offset.
pub(crate) fn number<const N: usize>(bytes: &[u8], at: usize) -> Result<u64> {
    let bytes = bytes.get(at..at + N).context("the file is cut off")?;
    Ok(bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

/// The text that begins at an offset and ends with a zero byte.
fn text(bytes: &[u8], at: usize) -> Result<&str> {
    let rest = bytes.get(at..).context("a name lies beyond the names")?;
    let end = rest.iter().position(|byte| *byte == 0).context("a name does not end")?;
    Ok(std::str::from_utf8(&rest[..end])?)
}
