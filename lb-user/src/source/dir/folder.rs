//! A folder's content: which file says what, and what that adds up to.
//!
//! Reads files (blocking); waits for nothing. What a file said last stays until the file says something else that can
//! be understood, or is gone. An object that several files hold is taken from the file whose name comes first.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fs::{self, Metadata},
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::manifest::{self, Manifest, Syntax};
use crate::{
    model::{Content, Kind, Object, ObjectKey, Problem, Update},
    source::convert::{Names, object_label},
};

/// The largest file that is read.
const LARGEST_FILE: u64 = 256 << 20;

/// What tells one state of a file from another.
type Stamp = (u64, u64, u64, i64, i64, i64, i64);

fn stamp(metadata: &Metadata) -> Stamp {
    (
        metadata.dev(),
        metadata.ino(),
        metadata.size(),
        metadata.mtime(),
        metadata.mtime_nsec(),
        metadata.ctime(),
        metadata.ctime_nsec(),
    )
}

#[derive(Debug, Default)]
struct File {
    /// The state that was last read; `None` if that failed.
    stamp: Option<Stamp>,
    /// What it last said that could be understood.
    objects: BTreeMap<ObjectKey, Object>,
}

/// The folder as it was last seen.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    files: BTreeMap<Arc<str>, File>,
    /// The files that hold each object, sorted; never empty.
    holders: HashMap<ObjectKey, Vec<Arc<str>>>,
    /// Subjects that something is wrong with now.
    troubled: BTreeSet<Arc<str>>,
    names: Names,
}

impl Folder {
    pub(super) fn new(path: PathBuf) -> Self {
        Self {
            path,
            files: BTreeMap::new(),
            holders: HashMap::new(),
            troubled: BTreeSet::new(),
            names: Names::default(),
        }
    }

    /// Looks at every file whose state has changed, but not at those `being_written`.
    ///
    /// # Errors
    /// The folder cannot be listed; nothing has changed then.
    pub(super) fn scan(&mut self, being_written: &HashSet<String>) -> io::Result<Vec<Update>> {
        let mut present = BTreeSet::new();
        for entry in fs::read_dir(&self.path)? {
            let name = entry?.file_name();
            if let Some(name) = name.to_str().filter(|name| Syntax::of(name).is_some()) {
                present.insert(name.to_owned());
            }
        }
        let gone: Vec<String> = self
            .files
            .keys()
            .filter(|name| !present.contains(&***name))
            .map(ToString::to_string)
            .collect();
        let mut updates = Vec::new();
        // New and changed files first, so that an object that moves from one file to another is never gone.
        for name in present
            .iter()
            .filter(|name| !being_written.contains(*name))
            .chain(&gone)
        {
            self.look(name, &mut updates);
        }
        Ok(updates)
    }

    /// Looks at some files by name; existing ones first.
    pub(super) fn look_at(&mut self, names: &BTreeSet<String>) -> Vec<Update> {
        let mut updates = Vec::new();
        let exists = |name: &&String| self.path.join(name).symlink_metadata().is_ok();
        let (present, gone): (Vec<&String>, Vec<&String>) = names.iter().partition(exists);
        for name in present.into_iter().chain(gone) {
            self.look(name, &mut updates);
        }
        updates
    }

    /// Everything, as a source says it first.
    pub(super) fn publish(&self) -> Vec<Update> {
        let (mut services, mut slices, mut nodes, mut pods) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for key in self.holders.keys() {
            match self.effective(key).cloned() {
                Some(Object::Service(service)) => services.push(service),
                Some(Object::Slice(slice)) => slices.push(slice),
                Some(Object::Node(node)) => nodes.push(node),
                Some(Object::Pod(pod)) => pods.push(pod),
                None => {}
            }
        }
        vec![
            Update::Replace(Content::Services(services)),
            Update::Replace(Content::Slices(slices)),
            Update::Replace(Content::Nodes(nodes)),
            Update::Replace(Content::Pods(pods)),
            Update::Synced(Kind::Service),
            Update::Synced(Kind::Slice),
            Update::Synced(Kind::Node),
            Update::Synced(Kind::Pod),
        ]
    }

    fn look(&mut self, name: &str, updates: &mut Vec<Update>) {
        let Some(syntax) = Syntax::of(name) else {
            return;
        };
        let path = self.path.join(name);
        if let Err(error) = path.symlink_metadata()
            && error.kind() == io::ErrorKind::NotFound
        {
            self.take(name, None, Manifest::default(), updates);
            self.say(path_text(&path), Vec::new(), updates);
            return;
        }
        let known = self.files.get(name).and_then(|file| file.stamp);
        let (stamp, outcome) = match read(&path, known) {
            Ok(None) => return,
            Ok(Some((stamp, text))) => (
                Some(stamp),
                manifest::parse(&path.to_string_lossy(), syntax, &text, &mut self.names),
            ),
            // Without a stamp the file is read again at the next look.
            Err(error) => (None, Err(unreadable(&path, &error))),
        };
        let problems = match outcome {
            Ok(mut manifest) => {
                let problems = std::mem::take(&mut manifest.problems);
                self.take(name, stamp, manifest, updates);
                problems
            }
            Err(problem) => {
                self.files.entry(name.into()).or_default().stamp = stamp;
                vec![problem]
            }
        };
        self.say(path_text(&path), problems, updates);
    }

    /// Puts what a file says in the place of what it said before; no stamp means that the file is gone.
    fn take(&mut self, name: &str, stamp: Option<Stamp>, manifest: Manifest, updates: &mut Vec<Update>) {
        let name: Arc<str> = name.into();
        let old = self.files.get(&name).map(|file| &file.objects);
        let mut touched: BTreeSet<ObjectKey> = old.into_iter().flat_map(BTreeMap::keys).cloned().collect();
        touched.extend(manifest.objects.keys().cloned());
        let before: Vec<Option<Object>> = touched.iter().map(|key| self.effective(key).cloned()).collect();

        if stamp.is_some() {
            let file = File {
                stamp,
                objects: manifest.objects,
            };
            self.files.insert(name.clone(), file);
        } else {
            self.files.remove(&name);
        }
        let file = self.files.get(&name);
        for key in &touched {
            let holders = self.holders.entry(key.clone()).or_insert_with(|| Vec::with_capacity(1));
            let holds = file.is_some_and(|file| file.objects.contains_key(key));
            match (holders.binary_search(&name), holds) {
                (Err(at), true) => holders.insert(at, name.clone()),
                (Ok(at), false) => {
                    holders.remove(at);
                }
                _ => {}
            }
            if holders.is_empty() {
                self.holders.remove(key);
            }
        }

        for (key, before) in touched.into_iter().zip(before) {
            match self.effective(&key) {
                Some(after) if before.as_ref() == Some(after) => {}
                Some(after) => updates.push(Update::Apply(after.clone())),
                None if before.is_some() => updates.push(Update::Delete(key.clone())),
                None => {}
            }
            self.say_duplicates(&key, updates);
        }
    }

    fn effective(&self, key: &ObjectKey) -> Option<&Object> {
        let holder = self.holders.get(key)?.first()?;
        self.files.get(holder)?.objects.get(key)
    }

    fn say_duplicates(&mut self, key: &ObjectKey, updates: &mut Vec<Update>) {
        let object = object_label(key.kind, &key.name.namespace, &key.name.name);
        let holders = self.holders.get(key).map_or(&[][..], Vec::as_slice);
        let problems = holders
            .iter()
            .skip(1)
            .map(|name| Problem {
                origin: path_text(&self.path.join(&**name)).to_string(),
                object: object.clone(),
                field: "metadata.name".to_owned(),
                message: format!("stands in {} already, and that one counts", holders[0]),
            })
            .collect();
        self.say(format!("duplicates of {object}").into(), problems, updates);
    }

    fn say(&mut self, subject: Arc<str>, problems: Vec<Problem>, updates: &mut Vec<Update>) {
        let was_troubled = if problems.is_empty() {
            self.troubled.remove(&subject)
        } else {
            !self.troubled.insert(subject.clone())
        };
        if was_troubled || !problems.is_empty() {
            updates.push(Update::Problems { subject, problems });
        }
    }
}

fn path_text(path: &Path) -> Arc<str> {
    path.to_string_lossy().into()
}

fn unreadable(path: &Path, error: &io::Error) -> Problem {
    Problem {
        origin: path.to_string_lossy().into_owned(),
        object: "(file)".to_owned(),
        field: "(content)".to_owned(),
        message: format!("cannot be read: {error}; what the file said before still holds"),
    }
}

/// Reads a file whole, unless it is in a `known` state. A file that changes meanwhile is an error, and read again.
fn read(path: &Path, known: Option<Stamp>) -> io::Result<Option<(Stamp, Vec<u8>)>> {
    // Before opening: a FIFO would block.
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    if known == Some(stamp(&metadata)) {
        return Ok(None);
    }
    if metadata.len() > LARGEST_FILE {
        let message = format!("it has {} bytes; wanted at most {LARGEST_FILE}", metadata.len());
        return Err(io::Error::other(message));
    }
    let mut file = fs::File::open(path)?;
    let before = stamp(&file.metadata()?);
    let mut text = Vec::with_capacity(metadata.len() as usize + 1);
    Read::by_ref(&mut file).take(LARGEST_FILE).read_to_end(&mut text)?;
    if stamp(&file.metadata()?) != before {
        return Err(io::Error::other("it changed while it was read"));
    }
    Ok(Some((before, text)))
}
