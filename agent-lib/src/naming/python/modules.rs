//! Table of the program's module objects by address: parent, name, and the cached tag of the path.
//!
//! It is read without a lock on the thread that allocates. The object is then a local variable of a running frame, so it is
//! alive, and its entry does not change unless Python registers it again. Writers hold a lock.
//!
//! A module that a compiler generated is registered as its own parent: what happens in it belongs to its caller.
//!
//! The table doubles when it is full. The old one stays mapped for late readers, and is reused for the table after the next.

use crate::base::locks::SpinLock;
use crate::base::memfd::{LazyTable, anonymous};
use crate::naming::python::layout;
use crate::naming::python::memory::{Memory, Pointer};
use crate::naming::python::walk::Reader;
use crate::record::names::Names;
use gpumem_wire::MAX_TAG_BYTES;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

/// Maximum number of modules at a time.
pub(crate) const MOST: usize = 1 << 16;
/// Entries of the first table; each next one has twice as many.
const FIRST: usize = 1 << 10;
const SIZES: usize = 8;
const _: () = assert!(FIRST << (SIZES - 1) == 2 * MOST);
/// Entries that a lookup tries.
const REACH: usize = 64;
/// Maximum number of modules in a path, from a module up through its parents.
pub(crate) const DEEPEST: usize = 48;
/// Maximum number of bases of a type to check.
const BASES: u64 = 64;
/// Marks an entry whose module is gone.
const GONE: u64 = 1;
/// Bytes for the texts of all names.
const TEXT_BYTES: usize = 4 << 20;
/// Longest name in bytes.
const NAME_BYTES: usize = 120;
/// Size of the index of names: a program that keeps making modules uses the same names again.
const NAMES: usize = 1 << 16;
/// Index entries that a lookup of a name tries.
const NEAR: usize = 8;

/// Entry of a module. All fields but `also` and `cached` are written under the lock.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Place {
    /// Address of the module; 0 if the entry was never used.
    object: AtomicU64,
    /// Its type when it was registered.
    kind: AtomicU64,
    /// A type derived from `kind` that it had when it was used: torch gives sharded and parametrized modules another class.
    also: AtomicU64,
    /// Address of the parent module; 0 for none; its own address if it was generated.
    parent: AtomicU64,
    /// Position of its name: offset << 16 | length.
    name: AtomicU64,
    /// Its own number << 32 | the parent's number, which is 0 if the parent was unknown at registration.
    numbers: AtomicU64,
    /// Epoch << 32 | tag.
    cached: AtomicU64,
}

impl Place {
    /// Returns all fields but the address.
    fn fields(&self) -> [&AtomicU64; 6] {
        [&self.kind, &self.also, &self.parent, &self.name, &self.numbers, &self.cached]
    }

    fn is_generated(&self) -> bool {
        self.parent.load(Relaxed) == self.object.load(Relaxed)
    }
}

#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Modules {
    /// Address of the table | log2 of its size divided by `FIRST`. 0 before the first table.
    table: AtomicU64,
    /// Changes when a path may have changed. Never 0.
    epoch: AtomicU32,
    /// The epoch at the end of the last sweep, from which the parameters have their names. 0 before the first sweep.
    parameters_epoch: AtomicU32,
    /// Two mappings for each size.
    spaces: [AtomicPtr<Place>; 2 * SIZES],
    text: AtomicPtr<u8>,
    text_used: AtomicUsize,
    /// Positions of known names, by their hash.
    said: LazyTable<AtomicU64, NAMES>,
    turn: SpinLock,
    number: AtomicU32,
    /// Registered modules, and entries of the table that are not 0.
    live: AtomicUsize,
    used: AtomicUsize,
    /// Paths that ended at an unregistered parent.
    dangling: AtomicUsize,
    /// Modules that found no room.
    pub refused: AtomicU64,
    /// Calls of modules that were not registered, or whose address now belongs to another object.
    pub unknown: AtomicU64,
}

impl Modules {
    pub(crate) const fn new() -> Self {
        Modules {
            table: AtomicU64::new(0),
            spaces: [const { AtomicPtr::new(std::ptr::null_mut()) }; 2 * SIZES],
            text: AtomicPtr::new(std::ptr::null_mut()),
            text_used: AtomicUsize::new(0),
            said: LazyTable::new(),
            turn: SpinLock::new(),
            epoch: AtomicU32::new(1),
            parameters_epoch: AtomicU32::new(0),
            number: AtomicU32::new(0),
            live: AtomicUsize::new(0),
            used: AtomicUsize::new(0),
            dangling: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
            unknown: AtomicU64::new(0),
        }
    }

    pub(crate) fn live(&self) -> usize {
        self.live.load(Relaxed)
    }

    #[inline(always)]
    fn places(&self) -> &'static [Place] {
        let table = self.table.load(Acquire);
        let size = (table & 63) as usize;
        if table == 0 {
            return &[];
        }
        // SAFETY: `grow` stored a zeroed table of that size, which stays mapped.
        unsafe { std::slice::from_raw_parts((table & !63) as *const Place, FIRST << size) }
    }

    #[inline(always)]
    fn home(object: u64, places: usize) -> usize {
        (object.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - places.trailing_zeros())) as usize
    }

    #[inline(always)]
    fn find<'a>(&self, places: &'a [Place], object: u64) -> Option<&'a Place> {
        if places.is_empty() || object <= GONE {
            return None;
        }
        let home = Self::home(object, places.len());
        for probe in 0..REACH {
            let place = &places[(home + probe) & (places.len() - 1)];
            match place.object.load(Acquire) {
                found if found == object => return Some(place),
                0 => return None,
                _ => {}
            }
        }
        None
    }

    /// Returns the tag of the path of `object`; `None` if it is generated, or another object at the address of one that died.
    #[inline(always)]
    pub(crate) fn tag(
        &self,
        names: &Names,
        reader: &Reader<'_, impl Memory>,
        object: Pointer,
    ) -> Option<u32> {
        let place = self.find(self.places(), object.address());
        let is_it = |place: &&Place| {
            let kind = reader.memory.word(object, layout::TYPE).unwrap_or(0);
            kind == place.kind.load(Relaxed)
                || kind == place.also.load(Relaxed)
                || self.derived(place, reader, kind)
        };
        let Some(place) = place.filter(is_it) else {
            self.unknown.fetch_add(1, Relaxed);
            return None;
        };
        let (cached, epoch) = (place.cached.load(Relaxed), self.epoch.load(Acquire));
        if cached >> 32 == u64::from(epoch) {
            return Some(cached as u32);
        }
        if place.is_generated() { None } else { Some(self.resolve(names, place, epoch)) }
    }

    /// Returns the tag of a generated module, used if none of its callers has a name.
    #[cold]
    pub(crate) fn generated(&self, names: &Names, object: u64) -> Option<u32> {
        let place = self.find(self.places(), object).filter(|place| place.is_generated())?;
        Some(self.path(names, &[place.name.load(Relaxed)]))
    }

    /// Whether the type is derived from the registered one; if so, caches it.
    #[cold]
    #[inline(never)]
    fn derived(&self, place: &Place, reader: &Reader<'_, impl Memory>, kind: u64) -> bool {
        let (said, memory) = (place.kind.load(Relaxed), reader.memory);
        let bases = || {
            let bases = memory.pointer(Pointer::new(kind)?, layout::BASES)?;
            let count = memory.word(bases, layout::LENGTH)?.min(BASES) as u16;
            let items = reader.layout.items;
            (0..count).find(|&index| memory.word(bases, items + index * 8) == Some(said))
        };
        let derived = said == 0 || bases().is_some();
        if derived {
            place.also.store(kind, Relaxed);
        }
        derived
    }

    /// Builds the path from the parents' current names and caches its tag.
    #[cold]
    #[inline(never)]
    fn resolve(&self, names: &Names, place: &Place, epoch: u32) -> u32 {
        let places = self.places();
        let mut chain = [0_u64; DEEPEST];
        let (mut at, mut count) = (place, 0);
        // `whole`: the path is complete. `lost`: a parent is gone; otherwise a missing parent may still be registered.
        let (mut whole, mut lost) = (true, false);
        while count < DEEPEST {
            chain[count] = at.name.load(Relaxed);
            count += 1;
            let parent = at.parent.load(Relaxed);
            if parent == 0 || at.is_generated() {
                break;
            }
            let wanted = at.numbers.load(Relaxed) as u32;
            let above = self.find(places, parent);
            let is_it = |above: &&Place| [0, (above.numbers.load(Relaxed) >> 32) as u32].contains(&wanted);
            let Some(above) = above.filter(is_it) else {
                (whole, lost) = (wanted != 0, wanted != 0);
                break;
            };
            at = above;
        }
        let before = place.cached.load(Relaxed) as u32;
        let tag = if lost && before != 0 {
            before // taken out of a model that is gone: it keeps its name
        } else {
            self.path(names, &chain[..count])
        };
        if !whole {
            self.dangling.fetch_add(1, Relaxed);
        }
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

    /// Records that a sweep has named all parameters after the current paths of their modules.
    pub(crate) fn name_parameters(&self) {
        self.parameters_epoch.store(self.epoch.load(Relaxed), Relaxed);
    }

    /// Whether parameters have the names that a sweep would give them now: no module has moved since the last one.
    pub(crate) fn has_current_parameters(&self) -> bool {
        self.parameters_epoch.load(Relaxed) == self.epoch.load(Relaxed)
    }

    /// Returns the tag of a chain of names, the outermost last, as far as there is room. A number joins its name: `h.3`.
    fn path(&self, names: &Names, chain: &[u64]) -> u32 {
        let (mut tag, mut component, mut len) = (0, [0; MAX_TAG_BYTES], 0);
        for &name in chain.iter().rev() {
            let name = self.name(name);
            let number = !name.is_empty() && name.iter().all(u8::is_ascii_digit);
            if number && len > 0 {
                component[len.min(MAX_TAG_BYTES - 1)] = b'.';
                len = (len + 1).min(MAX_TAG_BYTES);
            } else {
                if len > 0 {
                    match names.intern(tag, &component[..len]) {
                        0 => return tag,
                        inner => tag = inner,
                    }
                }
                len = 0;
            }
            let room = name.len().min(MAX_TAG_BYTES - len);
            component[len..len + room].copy_from_slice(&name[..room]);
            len += room;
        }
        match if len > 0 { names.intern(tag, &component[..len]) } else { 0 } {
            0 => tag,
            inner => inner,
        }
    }

    fn name(&self, at: u64) -> &'static [u8] {
        let text = self.text.load(Acquire);
        if text.is_null() || at == 0 {
            return b"?";
        }
        // SAFETY: `keep` wrote that range before it returned its position, and it is never written again.
        unsafe { std::slice::from_raw_parts(text.add((at >> 16) as usize), (at & 0xffff) as usize) }
    }

    /// Stores a name and returns its position; 0 (shown as `?`) if there is no room. The caller holds the lock.
    fn keep(&self, name: &[u8]) -> u64 {
        let name = &name[..name.len().min(NAME_BYTES)];
        if name.is_empty() || !self.has_text() {
            return 0;
        }
        let said = self.said.get();
        let hash =
            name.iter().fold(0_u64, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        let home = (hash ^ hash >> 32) as usize;
        let mut place = &said[home % NAMES];
        for probe in 0..NEAR {
            let next = &said[(home + probe) % NAMES];
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
        if start + name.len() > TEXT_BYTES {
            return 0;
        }
        self.text_used.store(start + name.len(), Relaxed);
        // SAFETY: the range lies inside of the mapping, and the lock keeps other writers out.
        unsafe {
            let to = self.text.load(Relaxed).add(start);
            std::ptr::copy_nonoverlapping(name.as_ptr(), to, name.len());
        }
        let at = (start as u64) << 16 | name.len() as u64;
        place.store(at, Relaxed);
        at
    }

    /// Returns whether there is memory for names; allocates it on first use. The caller holds the lock.
    fn has_text(&self) -> bool {
        if !self.said.make() {
            return false;
        }
        if self.text.load(Relaxed).is_null() {
            let Some(text) = anonymous::<u8>(TEXT_BYTES) else { return false };
            self.text.store(text.as_ptr().cast_mut(), Release);
        }
        true
    }

    /// Invalidates all cached paths.
    fn changed(&self) {
        let next = self.epoch.load(Relaxed).wrapping_add(1).max(1);
        self.epoch.store(next, Release);
    }

    /// Registers or changes a module, child `name` of `parent` (0: none; its own address: generated). False without room.
    pub(crate) fn say(&self, object: u64, kind: u64, parent: u64, name: &[u8]) -> bool {
        if Pointer::new(object).is_none() {
            self.refused.fetch_add(1, Relaxed);
            return false;
        }
        let _turn = self.turn.take();
        let name = self.keep(name);
        let above = self.find(self.places(), parent).filter(|_| parent != object);
        let above = above.map_or(0, |above| above.numbers.load(Relaxed) >> 32);
        if let Some(place) = self.find(self.places(), object) {
            let numbers = place.numbers.load(Relaxed) & !0xffff_ffff | above;
            let same = place.parent.load(Relaxed) == parent
                && place.name.load(Relaxed) == name
                && place.numbers.load(Relaxed) == numbers;
            if place.kind.load(Relaxed) != kind {
                place.kind.store(kind, Relaxed);
                place.also.store(0, Relaxed);
            }
            if !same {
                place.parent.store(parent, Relaxed);
                place.name.store(name, Relaxed);
                place.numbers.store(numbers, Relaxed);
                let tag = place.cached.load(Relaxed) & 0xffff_ffff; // of no epoch
                place.cached.store(tag, Relaxed);
                self.changed();
            }
            return true;
        }
        let number = self.number.load(Relaxed).wrapping_add(1).max(1);
        self.number.store(number, Relaxed);
        let fields = [kind, 0, parent, name, u64::from(number) << 32 | above, 0];
        let room = self.live() < MOST && self.room() && self.put(self.places(), object, fields);
        if !room {
            self.refused.fetch_add(1, Relaxed);
            return false;
        }
        self.live.fetch_add(1, Relaxed);
        if self.dangling.swap(0, Relaxed) != 0 {
            self.changed(); // perhaps this is a missing parent
        }
        true
    }

    fn put(&self, places: &[Place], object: u64, fields: [u64; 6]) -> bool {
        let home = Self::home(object, places.len());
        for probe in 0..REACH {
            let place = &places[(home + probe) & (places.len() - 1)];
            let found = place.object.load(Relaxed);
            if found > GONE {
                continue;
            }
            for (to, value) in place.fields().into_iter().zip(fields) {
                to.store(value, Relaxed);
            }
            place.object.store(object, Release);
            if found == 0 {
                self.used.fetch_add(1, Relaxed);
            }
            return true;
        }
        false
    }

    /// Grows the table, if needed, so that one more entry finds room near its home position. The caller holds the lock.
    fn room(&self) -> bool {
        let places = self.places().len();
        let size = (self.table.load(Relaxed) & 63) as usize;
        let most = if size + 1 < SIZES { places / 2 } else { places / 4 * 3 };
        if self.used.load(Relaxed) < most {
            return true;
        }
        let size = match places {
            0 => 0,
            _ if self.live() >= places / 4 && size + 1 < SIZES => size + 1,
            _ => size, // mostly entries of modules that are gone
        };
        self.grow(size)
    }

    fn grow(&self, size: usize) -> bool {
        let old = self.table.load(Relaxed);
        let spaces = &self.spaces[2 * size..2 * size + 2];
        let current = (old & !63) as *mut Place;
        let Some(space) = spaces.iter().find(|space| space.load(Relaxed) != current || current.is_null())
        else {
            return false;
        };
        if space.load(Relaxed).is_null() {
            let Some(fresh) = anonymous::<Place>(FIRST << size) else { return false };
            space.store(fresh.as_ptr().cast_mut(), Relaxed);
        }
        // SAFETY: the mapping was made above or in an earlier call; it has this size and is never unmapped.
        let places = unsafe { std::slice::from_raw_parts(space.load(Relaxed).cast_const(), FIRST << size) };
        places.iter().for_each(|place| place.object.store(0, Relaxed));
        self.used.store(0, Relaxed);
        for place in self.places() {
            let object = place.object.load(Relaxed);
            if object <= GONE {
                continue;
            }
            if !self.put(places, object, place.fields().map(|word| word.load(Relaxed))) {
                self.live.fetch_sub(1, Relaxed);
                self.refused.fetch_add(1, Relaxed);
            }
        }
        self.table.store(std::ptr::from_ref(&places[0]) as u64 | size as u64, Release);
        true
    }

    /// Removes a module. Its children keep their paths.
    pub(crate) fn gone(&self, object: u64) {
        let _turn = self.turn.take();
        let places = self.places();
        let Some(place) = self.find(places, object) else { return };
        self.live.fetch_sub(1, Relaxed);
        place.object.store(GONE, Release);
        // If the next entry is free, this entry and the removed ones before it become free.
        let mask = places.len() - 1;
        let home = Self::home(object, places.len());
        let mut at = (0..REACH)
            .map(|probe| (home + probe) & mask)
            .find(|&at| std::ptr::eq(&places[at], place))
            .unwrap_or(home);
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
        self.turn.reset();
    }
}

#[cfg(test)]
#[path = "modules_tests.rs"]
pub(crate) mod tests;
