//! Values of a pickle in flat memory: a value is a number, containers share what is equal.
//!
//! A list of frames is some 60 references, most often the same as another list's: lists that are filled at once and equal one
//! that was filled before share its items. So a long history takes less memory than its file has bytes; the worst that a file can do
//! is about 24 bytes of memory for each of its own, see [`Arena::bytes`].

use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::BuildHasher;

/// A value: its place among the nodes.
pub(super) type Ref = u32;
/// `None`, and the values that follow it in every arena.
pub(super) const NONE: Ref = 0;
const TRUE: Ref = 1;
const FALSE: Ref = 2;
const SMALL_INTS: Ref = 3;
/// No extent.
const NIL: u32 = u32::MAX;
/// Of a string that is given out: names in C++ have some hundreds.
const MAX_TEXT_BYTES: usize = 2048;
/// Shorter lists are not looked up.
const SHARED_FROM: usize = 4;

/// What a value is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Node {
    None,
    Bool(bool),
    Int(i64),
    /// An integer beyond 64 bits: nothing that a snapshot counts is so large.
    Wide,
    Float(f64),
    Text {
        start: u32,
        len: u32,
    },
    Bytes,
    List {
        last: u32,
    },
    Tuple {
        last: u32,
    },
    /// Keys and values in turn.
    Dict {
        last: u32,
    },
    Set {
        last: u32,
    },
}

/// A run of items. Containers are chains of them, the last first: what is shared never changes.
#[derive(Debug, Clone, Copy)]
struct Extent {
    start: u32,
    len: u32,
    before: u32,
}

/// Kinds of containers that can be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    List,
    Tuple,
    Dict,
    Set,
}

/// All values of one file.
#[derive(Debug)]
pub(super) struct Arena {
    nodes: Vec<Node>,
    items: Vec<Ref>,
    extents: Vec<Extent>,
    text: Vec<u8>,
    /// Hash of a list's items -> the extent that has them.
    seen: HashMap<u64, u32>,
    /// The extent that still may grow in place.
    growing: u32,
    /// Items that were put into containers, shared ones as often as they were.
    pub filled: u64,
}

/// The file has more values than can be numbered, or than there is memory for.
#[derive(Debug)]
pub(super) struct Full;

/// Makes room: without memory a file is refused, and the program goes on.
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

    /// Memory that the values take.
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

    /// `None` for one beyond 64 bits.
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

    /// Bytes are kept as nothing but bytes: a snapshot has none.
    pub fn new_bytes(&mut self) -> Result<Ref, Full> {
        self.push(Node::Bytes)
    }

    pub fn new_container(&mut self, kind: Kind) -> Result<Ref, Full> {
        let last = NIL;
        self.push(match kind {
            Kind::List => Node::List { last },
            Kind::Tuple => Node::Tuple { last },
            Kind::Dict => Node::Dict { last },
            Kind::Set => Node::Set { last },
        })
    }

    /// What kind of container a value is.
    pub fn kind(&self, value: Ref) -> Option<Kind> {
        match self.nodes.get(value as usize)? {
            Node::List { .. } => Some(Kind::List),
            Node::Tuple { .. } => Some(Kind::Tuple),
            Node::Dict { .. } => Some(Kind::Dict),
            Node::Set { .. } => Some(Kind::Set),
            _ => None,
        }
    }

    fn last_mut(&mut self, value: Ref) -> Option<&mut u32> {
        match self.nodes.get_mut(value as usize)? {
            Node::List { last } | Node::Tuple { last } | Node::Dict { last } | Node::Set { last } => {
                Some(last)
            }
            _ => None,
        }
    }

    /// The last extent of a container, which tells equal lists by their number. `None` for what is none, or empty.
    pub fn extent(&self, value: Ref) -> Option<u32> {
        match *self.nodes.get(value as usize)? {
            Node::List { last } | Node::Tuple { last } | Node::Dict { last } | Node::Set { last } => {
                (last != NIL).then_some(last)
            }
            _ => None,
        }
    }

    /// Puts `items` behind what a container has.
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
            // One by one (protocols 0 and 1): nothing came in between.
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
        if let Some(last) = self.last_mut(container) {
            *last = extent;
        }
        Ok(())
    }

    fn run(&self, extent: u32) -> &[Ref] {
        let extent = self.extents.get(extent as usize);
        let range = extent.map(|extent| extent.start as usize..extent.start as usize + extent.len as usize);
        range.and_then(|range| self.items.get(range)).unwrap_or_default()
    }

    /// The runs of items that a container is made of, in order; of a dict keys and values in turn.
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

    /// The beginning of a string: the same long one may be asked for very often.
    pub fn text(&self, value: Ref) -> Option<Cow<'_, str>> {
        let bytes = self.bytes_of(value)?;
        Some(String::from_utf8_lossy(bytes.get(..MAX_TEXT_BYTES).unwrap_or(bytes)))
    }

    /// What a value is, for people.
    pub fn describe(&self, value: Ref) -> &'static str {
        match self.nodes.get(value as usize) {
            None | Some(Node::None) => "None",
            Some(Node::Bool(_)) => "a bool",
            Some(Node::Int(_) | Node::Wide) => "a number",
            Some(Node::Float(_)) => "a float",
            Some(Node::Text { .. }) => "a string",
            Some(Node::Bytes) => "bytes",
            Some(Node::List { .. }) => "a list",
            Some(Node::Tuple { .. }) => "a tuple",
            Some(Node::Dict { .. }) => "a dict",
            Some(Node::Set { .. }) => "a set",
        }
    }
}
