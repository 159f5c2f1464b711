//! Table of the program's module objects: maps an object's address to its parent, its name, and the cached tag of its path.
//!
//! The thread that allocates reads the table without a lock. The module object is then a local variable of a running frame, so it
//! is alive. Its entry does not change unless Python registers it again. Writers hold a lock.
//!
//! A module that a compiler generated is registered as its own parent: its allocations have the name of its caller.
//!
//! The table doubles when it is half full. The old table stays mapped for late readers; its memory may be used again two tables
//! later.

use crate::base::locks::SpinLock;
use crate::base::memfd::{LazyTable, anonymous};
use crate::naming::python::layout;
use crate::naming::python::memory::{Memory, Pointer};
use crate::naming::python::text::{TextBuffer, put};
use crate::naming::python::walk::Reader;
use crate::record::names::Names;
use gpumem_wire::MAX_TAG_BYTES;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

pub(crate) const MAX_MODULES: usize = 1 << 16;
/// Number of entries of the first table; each next table has twice as many.
const FIRST: usize = 1 << 10;
const SIZES: usize = 8;
const _: () = assert!(FIRST << (SIZES - 1) == 2 * MAX_MODULES);
/// Number of entries, from the hashed position on, that a lookup tries.
const REACH: usize = 64;
/// Maximum number of modules in a path, from a module up through its parents.
pub(crate) const DEEPEST: usize = 48;
/// Maximum number of bases of a type to check.
const BASES: u64 = 64;
/// Factor that spreads addresses over the table.
const HASH: u64 = 0x9e37_79b9_7f4a_7c15;
/// Value of `Entry::object` for a removed module.
const GONE: u64 = 1;
/// Size of the memory for the names of all modules, in bytes.
const TEXT_BYTES: usize = 4 << 20;
/// Maximum length of a name in bytes.
const NAME_BYTES: usize = 120;
/// Size of the index of names: a program that keeps making modules uses the same names again.
const NAMES: usize = 1 << 16;
/// Number of index entries that a lookup of a name tries.
const NEAR: usize = 8;

/// Entry of a module. All fields but `derived` and `cached` are written under the lock.
#[derive(Default)]
#[repr(C, align(64))]
struct Entry {
    /// Address of the module; 0 if the entry was never used, `GONE` if its module was removed.
    object: AtomicU64,
    /// Address of the module's type at registration.
    kind: AtomicU64,
    /// Address of a type derived from `kind` that the module had later: torch changes the class of sharded modules.
    derived: AtomicU64,
    /// Address of the parent module; 0 without a parent; the module's own address if a compiler generated it.
    parent: AtomicU64,
    /// Position of the module's name in the memory for names: offset << 16 | length.
    name: AtomicU64,
    /// The module's number << 32 | the parent's number, which is 0 if the parent was unknown at registration.
    numbers: AtomicU64,
    /// Cached path: epoch << 32 | tag.
    cached: AtomicU64,
}

impl Entry {
    /// Returns all fields but the address.
    fn fields(&self) -> [&AtomicU64; 6] {
        [&self.kind, &self.derived, &self.parent, &self.name, &self.numbers, &self.cached]
    }

    fn is_generated(&self) -> bool {
        self.parent.load(Relaxed) == self.object.load(Relaxed)
    }
}

#[repr(C, align(64))]
pub(crate) struct Modules {
    /// Address of the table | log2(size / `FIRST`), where the size is its number of entries. 0 before the first table.
    table: AtomicU64,
    /// Number that increases when a path may have changed. Never 0.
    epoch: AtomicU32,
    /// Value of `epoch` when Python code last named all parameters after their modules' paths; 0 before.
    parameters_epoch: AtomicU32,
    /// Memory for tables: two mappings for each size, so that a table can be made anew in the same size.
    spaces: [AtomicPtr<Entry>; 2 * SIZES],
    text: LazyTable<AtomicU8, TEXT_BYTES>,
    text_used: AtomicUsize,
    /// Positions of stored module names, by the hash of the name.
    name_index: LazyTable<AtomicU64, NAMES>,
    /// Lock of all writers.
    lock: SpinLock,
    /// Number of the module that was registered last.
    number: AtomicU32,
    live: AtomicUsize,
    /// Number of entries of the table that were used, including those of removed modules.
    used: AtomicUsize,
    /// Number of paths that ended at an unregistered parent, since a module was last added.
    dangling: AtomicUsize,
    /// Number of calls of modules that were not registered, or whose address now belongs to another object.
    pub unknown: AtomicU64,
}

impl Modules {
    pub(crate) const fn new() -> Self {
        Modules {
            table: AtomicU64::new(0),
            spaces: [const { AtomicPtr::new(std::ptr::null_mut()) }; 2 * SIZES],
            text: LazyTable::new(),
            text_used: AtomicUsize::new(0),
            name_index: LazyTable::new(),
            lock: SpinLock::new(),
            epoch: AtomicU32::new(1),
            parameters_epoch: AtomicU32::new(0),
            number: AtomicU32::new(0),
            live: AtomicUsize::new(0),
            used: AtomicUsize::new(0),
            dangling: AtomicUsize::new(0),
            unknown: AtomicU64::new(0),
        }
    }

    #[inline(always)]
    fn places(&self) -> &'static [Entry] {
        let table = self.table.load(Acquire);
        let size = (table & 63) as usize;
        if table == 0 {
            return &[];
        }
        // SAFETY: `make_room` stored a table of that size, which stays mapped.
        unsafe { std::slice::from_raw_parts((table & !63) as *const Entry, FIRST << size) }
    }

    /// Returns the entries that may be those of `object`. The table must not be empty.
    #[inline(always)]
    fn probes(places: &[Entry], object: u64) -> impl Iterator<Item = &Entry> {
        let home = object.wrapping_mul(HASH) >> (64 - places.len().trailing_zeros());
        (0..REACH).map(move |probe| &places[(home as usize + probe) & (places.len() - 1)])
    }

    #[inline(always)]
    fn find<'a>(&self, places: &'a [Entry], object: u64) -> Option<&'a Entry> {
        if places.is_empty() || object <= GONE {
            return None;
        }
        for place in Self::probes(places, object) {
            match place.object.load(Acquire) {
                found if found == object => return Some(place),
                0 => return None,
                _ => {}
            }
        }
        None
    }

    /// Like `find`, for the path of an allocation: nearly always the entry is at its hashed position.
    #[inline(always)]
    fn find_at_home(&self, object: u64) -> Option<&'static Entry> {
        let table = self.table.load(Acquire);
        if table == 0 {
            return None;
        }
        let bits = FIRST.trailing_zeros() + (table & 63) as u32;
        let home = object.wrapping_mul(HASH) >> (64 - bits);
        // SAFETY: as in `places`; the table has 2^bits entries.
        let place = unsafe { &*((table & !63) as *const Entry).add(home as usize) };
        if place.object.load(Acquire) == object { Some(place) } else { self.find_further(object) }
    }

    #[cold]
    #[inline(never)]
    fn find_further(&self, object: u64) -> Option<&'static Entry> {
        self.find(self.places(), object)
    }

    /// Whether a module is registered with this address.
    pub(crate) fn has(&self, object: u64) -> bool {
        self.find(self.places(), object).is_some()
    }

    /// Returns the tag of the path of the module at `object`. Returns `None` if it is generated or not registered, or if another
    /// object now has the address of a registered module.
    #[inline(always)]
    pub(crate) fn tag(
        &self,
        names: &Names,
        reader: &Reader<'_, impl Memory>,
        object: Pointer,
    ) -> Option<u32> {
        let Some(place) = self.find_at_home(object.address()) else {
            self.unknown.fetch_add(1, Relaxed);
            return None;
        };
        let kind = reader.memory.word(object, layout::TYPE).unwrap_or(0);
        let is_module = kind == place.kind.load(Relaxed)
            || kind == place.derived.load(Relaxed)
            || self.is_derived(place, reader, kind);
        if !is_module {
            self.unknown.fetch_add(1, Relaxed);
            return None;
        }
        let (cached, epoch) = (place.cached.load(Relaxed), self.epoch.load(Acquire));
        if cached >> 32 == u64::from(epoch) {
            return Some(cached as u32);
        }
        if place.is_generated() { None } else { Some(self.resolve(names, place, epoch)) }
    }

    /// Returns the tag of a generated module's own name; `None` if the module is not a generated one.
    #[cold]
    pub(crate) fn generated(&self, names: &Names, object: u64) -> Option<u32> {
        let place = self.find(self.places(), object).filter(|place| place.is_generated())?;
        Some(self.path(names, &[place.name.load(Relaxed)]))
    }

    /// Whether the type is derived from the type at registration; if so, caches it.
    #[cold]
    #[inline(never)]
    fn is_derived(&self, place: &Entry, reader: &Reader<'_, impl Memory>, kind: u64) -> bool {
        let (registered, memory) = (place.kind.load(Relaxed), reader.memory);
        let has_base = || {
            let bases = memory.pointer(Pointer::new(kind)?, layout::BASES)?;
            let count = memory.word(bases, layout::LENGTH)?.min(BASES) as u16;
            let base = |index| memory.word(bases, reader.layout.items + index * 8);
            Some((0..count).any(|index| base(index) == Some(registered)))
        };
        let is_derived = registered == 0 || has_base() == Some(true);
        if is_derived {
            place.derived.store(kind, Relaxed);
        }
        is_derived
    }

    /// Builds the path from the parents' current names and caches its tag.
    #[cold]
    #[inline(never)]
    fn resolve(&self, names: &Names, place: &Entry, epoch: u32) -> u32 {
        let places = self.places();
        let mut chain = [0_u64; DEEPEST];
        let (mut at, mut count) = (place, 0);
        let mut is_parent_gone = false;
        while count < DEEPEST {
            chain[count] = at.name.load(Relaxed);
            count += 1;
            let parent = at.parent.load(Relaxed);
            if parent == 0 || at.is_generated() {
                break;
            }
            let wanted = at.numbers.load(Relaxed) as u32;
            let has_number =
                |above: &&Entry| [0, (above.numbers.load(Relaxed) >> 32) as u32].contains(&wanted);
            let Some(above) = self.find(places, parent).filter(has_number) else {
                is_parent_gone = wanted != 0;
                if wanted == 0 {
                    self.dangling.fetch_add(1, Relaxed); // the parent may still be registered
                }
                break;
            };
            at = above;
        }
        let before = place.cached.load(Relaxed) as u32;
        let tag = if is_parent_gone && before != 0 {
            before // a part of a model that is gone keeps its name
        } else {
            self.path(names, &chain[..count])
        };
        place.cached.store(u64::from(epoch) << 32 | u64::from(tag), Relaxed);
        tag
    }

    /// Updates the cached tags of modules that were called before. A module that loses its parent afterwards keeps that path.
    pub(crate) fn settle(&self, names: &Names) {
        let epoch = self.epoch.load(Acquire);
        for place in self.places().iter().filter(|place| place.object.load(Acquire) > GONE) {
            let cached = place.cached.load(Relaxed);
            if cached as u32 != 0 && cached >> 32 != u64::from(epoch) && !place.is_generated() {
                self.resolve(names, place, epoch);
            }
        }
    }

    /// Stores that Python code has named all parameters after the current paths of their modules.
    pub(crate) fn name_parameters(&self) {
        self.parameters_epoch.store(self.epoch.load(Relaxed), Relaxed);
    }

    /// Whether parameters still have the names of their modules' paths: no module has moved since they were named.
    pub(crate) fn has_current_parameters(&self) -> bool {
        self.parameters_epoch.load(Relaxed) == self.epoch.load(Relaxed)
    }

    /// Returns the tag of the path of the names at the positions `chain`, the outermost last. Leaves out inner names for which
    /// there is no room. A number is joined to the name before it: `h.3`.
    fn path(&self, names: &Names, chain: &[u64]) -> u32 {
        let mut room = [0; MAX_TAG_BYTES];
        let (mut tag, mut component) = (0, TextBuffer::new(&mut room));
        let intern = |tag: u32, component: &TextBuffer<'_>| {
            names.intern(tag, &component.get_ref()[..component.position() as usize])
        };
        for &name in chain.iter().rev() {
            let name = self.name(name);
            if component.position() > 0 && name.iter().all(u8::is_ascii_digit) {
                put(&mut component, b".");
            } else if component.position() > 0 {
                match intern(tag, &component) {
                    0 => return tag,
                    inner => tag = inner,
                }
                component.set_position(0);
            }
            put(&mut component, name);
        }
        match intern(tag, &component) {
            0 => tag,
            inner => inner,
        }
    }

    /// Returns the name at a position; `?` for position 0.
    fn name(&self, at: u64) -> &'static [u8] {
        let (start, len) = ((at >> 16) as usize, (at & 0xffff) as usize);
        let Some(text) = self.text.get().get(start..start + len).filter(|_| at != 0) else { return b"?" };
        // SAFETY: `store_name` wrote that range before it returned its position, and it is never written again.
        unsafe { std::slice::from_raw_parts(text.as_ptr().cast(), len) }
    }

    /// Stores a name and returns its position; 0 if there is no room. The caller holds the lock.
    fn store_name(&self, name: &[u8]) -> u64 {
        let name = &name[..name.len().min(NAME_BYTES)];
        if name.is_empty() || !self.name_index.make() || !self.text.make() {
            return 0;
        }
        let index = self.name_index.get();
        let hash =
            name.iter().fold(0_u64, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        let home = (hash ^ hash >> 32) as usize;
        let mut place = &index[home % NAMES];
        for probe in 0..NEAR {
            let next = &index[(home + probe) % NAMES];
            let at = next.load(Relaxed);
            if at == 0 {
                place = next;
                break;
            }
            if self.name(at) == name {
                return at;
            }
        }
        let start = self.text_used.load(Relaxed);
        let Some(text) = self.text.get().get(start..start + name.len()) else { return 0 };
        text.iter().zip(name).for_each(|(to, &byte)| to.store(byte, Relaxed));
        self.text_used.store(start + name.len(), Relaxed);
        let at = (start as u64) << 16 | name.len() as u64;
        place.store(at, Relaxed);
        at
    }

    fn invalidate_paths(&self) {
        let next = self.epoch.load(Relaxed).wrapping_add(1).max(1);
        self.epoch.store(next, Release);
    }

    /// Registers or changes the module `object` as child `name` of `parent`: 0 if it has none, `object` itself if a compiler
    /// generated it. Returns false if there is no room.
    pub(crate) fn register(&self, object: u64, kind: u64, parent: u64, name: &[u8]) -> bool {
        if Pointer::new(object).is_none() {
            return false;
        }
        let _guard = self.lock.take();
        let name = self.store_name(name);
        let above = self.find(self.places(), parent).filter(|_| parent != object);
        let above = above.map_or(0, |above| above.numbers.load(Relaxed) >> 32);
        if let Some(place) = self.find(self.places(), object) {
            let numbers = place.numbers.load(Relaxed) & !0xffff_ffff | above;
            if place.kind.swap(kind, Relaxed) != kind {
                place.derived.store(0, Relaxed);
            }
            // All three are stored, so no short-circuit.
            let has_changed = (place.parent.swap(parent, Relaxed) != parent)
                | (place.name.swap(name, Relaxed) != name)
                | (place.numbers.swap(numbers, Relaxed) != numbers);
            if has_changed {
                place.cached.fetch_and(0xffff_ffff, Relaxed); // keeps the tag, without an epoch
                self.invalidate_paths();
            }
            return true;
        }
        let number = self.number.load(Relaxed).wrapping_add(1).max(1);
        self.number.store(number, Relaxed);
        let fields = [kind, 0, parent, name, u64::from(number) << 32 | above, 0];
        let has_room = self.live.load(Relaxed) < MAX_MODULES && self.make_room();
        if !has_room || !self.put(self.places(), object, fields) {
            return false;
        }
        self.live.fetch_add(1, Relaxed);
        if self.dangling.swap(0, Relaxed) != 0 {
            self.invalidate_paths(); // the new module may be a missing parent
        }
        true
    }

    /// Writes an entry for `object`; returns false if there is no free entry near the hashed position.
    fn put(&self, places: &[Entry], object: u64, fields: [u64; 6]) -> bool {
        let is_free = |place: &&Entry| place.object.load(Relaxed) <= GONE;
        let Some(place) = Self::probes(places, object).find(is_free) else { return false };
        for (to, value) in place.fields().into_iter().zip(fields) {
            to.store(value, Relaxed);
        }
        if place.object.swap(object, Release) == 0 {
            self.used.fetch_add(1, Relaxed);
        }
        true
    }

    /// Replaces the table if it is too full for one more entry. Returns false without memory. The caller holds the lock.
    fn make_room(&self) -> bool {
        let places = self.places();
        let table = self.table.load(Relaxed);
        let size = (table & 63) as usize;
        let most = if size + 1 < SIZES { places.len() / 2 } else { places.len() / 4 * 3 };
        if self.used.load(Relaxed) < most {
            return true;
        }
        // A table that is full of removed modules is replaced by one of the same size.
        let is_larger = table != 0 && self.live.load(Relaxed) >= places.len() / 4 && size + 1 < SIZES;
        let size = if is_larger { size + 1 } else { size };
        let is_in_use = |space: &AtomicPtr<Entry>| table != 0 && space.load(Relaxed) as u64 == table & !63;
        let space = &self.spaces[2 * size + usize::from(is_in_use(&self.spaces[2 * size]))];
        if space.load(Relaxed).is_null() {
            let Some(new) = anonymous::<Entry>(FIRST << size) else { return false };
            space.store(new.as_ptr().cast_mut(), Relaxed);
        }
        // SAFETY: the mapping was made above or in an earlier call; it has this size and is never unmapped.
        let new = unsafe { std::slice::from_raw_parts(space.load(Relaxed).cast_const(), FIRST << size) };
        new.iter().for_each(|place| place.object.store(0, Relaxed));
        self.used.store(0, Relaxed);
        for place in places {
            let object = place.object.load(Relaxed);
            if object > GONE && !self.put(new, object, place.fields().map(|word| word.load(Relaxed))) {
                self.live.fetch_sub(1, Relaxed);
            }
        }
        self.table.store(new.as_ptr() as u64 | size as u64, Release);
        true
    }

    /// Removes a module. Its children keep their paths.
    pub(crate) fn gone(&self, object: u64) {
        let _guard = self.lock.take();
        let places = self.places();
        let Some(place) = self.find(places, object) else { return };
        self.live.fetch_sub(1, Relaxed);
        place.object.store(GONE, Release);
        // If the next entry is free, this entry and the removed ones before it become free.
        let mask = places.len() - 1;
        let mut at = (std::ptr::from_ref(place) as usize - places.as_ptr() as usize) / size_of::<Entry>();
        if places[(at + 1) & mask].object.load(Relaxed) != 0 {
            return;
        }
        while places[at].object.load(Relaxed) == GONE {
            places[at].object.store(0, Release);
            self.used.fetch_sub(1, Relaxed);
            at = at.wrapping_sub(1) & mask;
        }
    }

    /// Resets the lock in a forked child: the thread that held it does not exist there.
    pub(crate) fn in_child(&self) {
        self.lock.reset();
    }
}

#[cfg(test)]
#[path = "modules_tests.rs"]
pub(crate) mod tests;
