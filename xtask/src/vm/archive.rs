//! Writes an initramfs: a "newc" cpio archive, uncompressed.
//!
//! Only what the kernel's unpacker reads. The invariant: a file's parent folders come before it.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

const FOLDER: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// An archive under construction.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    paths: BTreeSet<PathBuf>,
}

impl Archive {
    /// Whether the archive already has the path.
    pub(crate) fn has(&self, path: &Path) -> bool {
        self.paths.contains(&relative(path))
    }

    /// Adds a folder and its parents.
    pub(crate) fn folder(&mut self, path: &str) {
        self.parents_and(&relative(Path::new(path)));
    }

    /// Adds a regular file; the first of one path stays.
    pub(crate) fn file(&mut self, path: &Path, permissions: u32, content: &[u8]) {
        self.leaf(path, FILE | permissions, (0, 0), content);
    }

    /// Adds a character device.
    pub(crate) fn device(&mut self, path: &Path, major: u32, minor: u32) {
        self.leaf(path, CHARACTER_DEVICE | 0o600, (major, minor), &[]);
    }

    /// Ends the archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn leaf(&mut self, path: &Path, mode: u32, device: (u32, u32), content: &[u8]) {
        let path = relative(path);
        if let Some(parent) = path.parent() {
            self.parents_and(parent);
        }
        if self.paths.insert(path.clone()) {
            self.entry(&path.to_string_lossy(), mode, device, content);
        }
    }

    fn parents_and(&mut self, folder: &Path) {
        if folder.as_os_str().is_empty() || self.paths.contains(folder) {
            return;
        }
        if let Some(parent) = folder.parent() {
            self.parents_and(parent);
        }
        self.paths.insert(folder.to_path_buf());
        self.entry(&folder.to_string_lossy(), FOLDER | 0o755, (0, 0), &[]);
    }

    fn entry(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), content: &[u8]) {
        self.entries += 1;
        let fields = [
            self.entries, // inode
            mode,
            0, // owner
            0, // group
            1, // links
            0, // modification time: equal inputs make equal archives
            content.len() as u32,
            0, // major and minor number of the archive's own device
            0,
            major,
            minor,
            name.len() as u32 + 1,
            0, // checksum, unused in this format
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// The path as the archive names it: below the root, without `.` and `..`.
fn relative(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => clean.push(name),
            Component::ParentDir => {
                clean.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::Archive;
    use std::path::Path;

    /// Reads names and contents back, by the format's description and not by the writer's code.
    fn entries(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
        let field = |at: usize, index: usize| {
            let start = at + 6 + 8 * index;
            let text = std::str::from_utf8(&bytes[start..start + 8]).expect("ASCII");
            usize::from_str_radix(text, 16).expect("hexadecimal")
        };
        let (mut at, mut found) = (0, Vec::new());
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let (size, name_size) = (field(at, 6), field(at, 11));
            let name = &bytes[at + 110..at + 110 + name_size - 1];
            let content = (at + 110 + name_size).next_multiple_of(4);
            found.push((
                String::from_utf8(name.to_vec()).expect("UTF-8"),
                bytes[content..content + size].to_vec(),
            ));
            at = (content + size).next_multiple_of(4);
        }
        found
    }

    #[test]
    fn parents_precede_files_and_the_trailer_ends() {
        let mut archive = Archive::default();
        archive.file(Path::new("/lib/x86/../y/a.so"), 0o755, b"seven b");
        archive.file(Path::new("/lib/y/a.so"), 0o755, b"other");
        archive.device(Path::new("/lib/console"), 5, 1);
        let found = entries(&archive.finish());
        let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["lib", "lib/y", "lib/y/a.so", "lib/console", "TRAILER!!!"]);
        assert_eq!(found[2].1, b"seven b");
        assert_eq!(found[3].1, b"");
    }
}
