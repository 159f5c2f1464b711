//! Stores the values of a pickle in a few vectors. A value is an index into them, and equal lists share the memory of their
//! items.
//!
//! A history has a list of some 60 stack frames for each entry, and most of these lists are equal. A list that gets all its items
//! at once and equals an earlier list shares its items. Therefore a long history takes less memory than its file has bytes. In
//! the worst case, a file takes about 24 bytes of memory for each of its bytes, see [`Arena::bytes`].

use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::BuildHasher;

/// A value, as the index of its node in the arena.
pub(crate) type Ref = u32;
/// Index of `None`. Every arena begins with `None`, true, false, and the integers from 0 to 255.
pub(super) const NONE: Ref = 0;
const TRUE: Ref = 1;
const FALSE: Ref = 2;
const SMALL_INTS: Ref = 3;
/// Index that stands for "no extent".
const NIL: u32 = u32::MAX;
/// Maximum length in bytes of a string that [`Arena::text`] returns. Names of C++ functions have some hundreds of bytes.
const MAX_TEXT_BYTES: usize = 2048;
/// Minimum number of items of a list that may be shared.
const SHARED_FROM: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Node {
    None,
    Bool(bool),
    Int(i64),
    /// An integer beyond 64 bits. Its value is not kept, because a snapshot does not need it.
    Wide,
    Float(f64),
    Text {
        start: u32,
        len: u32,
    },
    Bytes,
    /// A list, tuple, dict or set; `last` is the index of its last extent. The items of a dict are keys and values in turn.
    Container {
        kind: Kind,
        last: u32,
    },
}

/// A range of `items` that belongs to a container, and the index of the container's extent before it. A shared extent never
/// changes.
#[derive(Debug, Clone, Copy)]
struct Extent {
    start: u32,
    len: u32,
    before: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    List,
    Tuple,
    Dict,
    Set,
}

/// All values of one pickle file.
#[derive(Debug, Default)]
pub(super) struct Arena {
    nodes: Vec<Node>,
    items: Vec<Ref>,
    extents: Vec<Extent>,
    text: Vec<u8>,
    /// Index of an extent by the hash of its items, to find equal lists.
    seen: HashMap<u64, u32>,
    /// Index of the extent that may still grow in place.
    growing: u32,
    /// Number of items put into containers so far; shared items count once for each container.
    pub filled: u64,
}

/// Error: the file has more values than there are indices, or memory is exhausted.
#[derive(Debug)]
pub(super) struct Full;

/// Reserves memory for `more` items. Returns an error if there is no memory, so that the file is rejected and the program goes
/// on.
#[inline]
pub(super) fn reserve<T>(items: &mut Vec<T>, more: usize) -> Result<(), Full> {
    if items.capacity() - items.len() >= more {
        return Ok(());
    }
    items.try_reserve(more).map_err(|_| Full)
}

impl Arena {
    pub fn new() -> Self {
        let mut nodes = vec![Node::None, Node::Bool(true), Node::Bool(false)];
        nodes.extend((0..256).map(Node::Int));
        Arena {
            nodes,
            items: Vec::new(),
            extents: Vec::new(),
            text: Vec::new(),
            seen: HashMap::new(),
            growing: NIL,
            filled: 0,
        }
    }

    /// Returns the bytes of memory that all values occupy.
    pub fn bytes(&self) -> u64 {
        let lengths = [
            (self.nodes.len(), size_of::<Node>()),
            (self.items.len(), size_of::<Ref>()),
            (self.extents.len(), size_of::<Extent>()),
            (self.text.len(), 1),
            (self.seen.len(), 24),
        ];
        lengths.iter().map(|&(count, bytes)| count as u64 * bytes as u64).sum()
    }

    fn push(&mut self, node: Node) -> Result<Ref, Full> {
        let place = u32::try_from(self.nodes.len()).ok().filter(|&place| place != NIL).ok_or(Full)?;
        reserve(&mut self.nodes, 1)?;
        self.nodes.push(node);
        Ok(place)
    }

    pub fn bool(value: bool) -> Ref {
        if value { TRUE } else { FALSE }
    }

    /// Creates an integer; `None` stands for an integer beyond 64 bits.
    pub fn new_int(&mut self, value: Option<i64>) -> Result<Ref, Full> {
        match value {
            Some(small @ 0..256) => Ok(SMALL_INTS + small as u32),
            Some(value) => self.push(Node::Int(value)),
            None => self.push(Node::Wide),
        }
    }

    pub fn new_float(&mut self, value: f64) -> Result<Ref, Full> {
        self.push(Node::Float(value))
    }

    pub fn new_text(&mut self, text: &[u8]) -> Result<Ref, Full> {
        let start = u32::try_from(self.text.len()).map_err(|_| Full)?;
        let len = u32::try_from(text.len()).map_err(|_| Full)?;
        reserve(&mut self.text, text.len())?;
        self.text.extend_from_slice(text);
        self.push(Node::Text { start, len })
    }

    /// Creates a value for a bytes object. Its content is not kept, because snapshots contain no bytes objects.
    pub fn new_bytes(&mut self) -> Result<Ref, Full> {
        self.push(Node::Bytes)
    }

    pub fn new_container(&mut self, kind: Kind) -> Result<Ref, Full> {
        self.push(Node::Container { kind, last: NIL })
    }

    /// Returns the kind of a container; `None` for other values.
    pub fn kind(&self, value: Ref) -> Option<Kind> {
        match self.nodes.get(value as usize)? {
            Node::Container { kind, .. } => Some(*kind),
            _ => None,
        }
    }

    /// Returns the index of a container's last extent, which is equal for lists that share their items. `None` for an empty
    /// container and for other values.
    pub fn extent(&self, value: Ref) -> Option<u32> {
        match *self.nodes.get(value as usize)? {
            Node::Container { last, .. } if last != NIL => Some(last),
            _ => None,
        }
    }

    pub fn fill(&mut self, container: Ref, items: &[Ref]) -> Result<(), Full> {
        if items.is_empty() {
            return Ok(());
        }
        self.filled += items.len() as u64;
        let before = self.extent(container).unwrap_or(NIL);
        let start = u32::try_from(self.items.len()).map_err(|_| Full)?;
        let len = u32::try_from(items.len()).map_err(|_| Full)?;
        reserve(&mut self.items, items.len())?;
        reserve(&mut self.extents, 1)?;
        if before != NIL && before == self.growing {
            // Protocols 0 and 1 append single items. No other container got items since the last one, so its extent can grow.
            if let Some(extent) = self.extents.get_mut(before as usize)
                && extent.start.checked_add(extent.len) == Some(start)
            {
                extent.len = extent.len.checked_add(len).ok_or(Full)?;
                self.items.extend_from_slice(items);
                return Ok(());
            }
        }
        let place = u32::try_from(self.extents.len()).ok().filter(|&place| place != NIL).ok_or(Full)?;
        let is_shared =
            before == NIL && items.len() >= SHARED_FROM && self.kind(container) == Some(Kind::List);
        let mut extent = place;
        if is_shared {
            let hash = foldhash::fast::FixedState::default().hash_one(items);
            match self.seen.get(&hash).filter(|&&known| self.run(known) == items) {
                Some(&known) => extent = known,
                None => {
                    self.seen.try_reserve(1).map_err(|_| Full)?;
                    self.seen.insert(hash, place);
                }
            }
        }
        if extent == place {
            self.items.extend_from_slice(items);
            self.extents.push(Extent { start, len, before });
            self.growing = if is_shared { NIL } else { place };
        }
        if let Some(Node::Container { last, .. }) = self.nodes.get_mut(container as usize) {
            *last = extent;
        }
        Ok(())
    }

    fn run(&self, extent: u32) -> &[Ref] {
        let extent = self.extents.get(extent as usize);
        let range = extent.map(|extent| extent.start as usize..extent.start as usize + extent.len as usize);
        range.and_then(|range| self.items.get(range)).unwrap_or_default()
    }

    /// Returns the container's items in order, as one slice for each extent. The items of a dict are keys and values in turn.
    pub fn runs(&self, container: Ref) -> impl Iterator<Item = &[Ref]> {
        let mut chain = Vec::new();
        let mut at = self.extent(container);
        while let Some(extent) = at {
            chain.push(extent);
            at =
                self.extents.get(extent as usize).map(|extent| extent.before).filter(|&before| before != NIL);
        }
        chain.into_iter().rev().map(|extent| self.run(extent))
    }

    /// Returns the values of keys in `names` (separated by blanks), [`NONE`] for a missing key; `None` if `dict` is not a dict.
    /// Reads only the first `limit` pairs.
    pub fn fields<const N: usize>(&self, dict: Ref, names: &str, limit: usize) -> Option<[Ref; N]> {
        if self.kind(dict) != Some(Kind::Dict) {
            return None;
        }
        let mut names = names.split(' ');
        let names: [&[u8]; N] = std::array::from_fn(|_| names.next().unwrap_or_default().as_bytes());
        let mut found = [NONE; N];
        for pair in self.runs(dict).flat_map(|run| run.chunks_exact(2)).take(limit) {
            let &[key, value] = pair else { continue };
            let key = self.bytes_of(key);
            if let Some((_, slot)) = names.iter().zip(&mut found).find(|(name, _)| Some(**name) == key) {
                *slot = value;
            }
        }
        Some(found)
    }

    pub fn int(&self, value: Ref) -> Option<i64> {
        match *self.nodes.get(value as usize)? {
            Node::Int(value) => Some(value),
            Node::Bool(value) => Some(value.into()),
            _ => None,
        }
    }

    pub fn is_true(&self, value: Ref) -> bool {
        self.nodes.get(value as usize) == Some(&Node::Bool(true))
    }

    pub fn bytes_of(&self, value: Ref) -> Option<&[u8]> {
        match *self.nodes.get(value as usize)? {
            Node::Text { start, len } => self.text.get(start as usize..start as usize + len as usize),
            _ => None,
        }
    }

    /// Returns the first [`MAX_TEXT_BYTES`] of a string. A file may use a long string very often, which would take too much time.
    pub fn text(&self, value: Ref) -> Option<Cow<'_, str>> {
        let bytes = self.bytes_of(value)?;
        Some(String::from_utf8_lossy(bytes.get(..MAX_TEXT_BYTES).unwrap_or(bytes)))
    }

    /// Names the type of a value, for error messages.
    pub fn describe(&self, value: Ref) -> &'static str {
        match self.nodes.get(value as usize) {
            None | Some(Node::None) => "None",
            Some(Node::Bool(_)) => "a bool",
            Some(Node::Int(_) | Node::Wide) => "a number",
            Some(Node::Float(_)) => "a float",
            Some(Node::Text { .. }) => "a string",
            Some(Node::Bytes) => "bytes",
            Some(Node::Container { kind: Kind::List, .. }) => "a list",
            Some(Node::Container { kind: Kind::Tuple, .. }) => "a tuple",
            Some(Node::Container { kind: Kind::Dict, .. }) => "a dict",
            Some(Node::Container { kind: Kind::Set, .. }) => "a set",
        }
    }
}
