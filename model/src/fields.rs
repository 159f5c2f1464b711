//! The macro `fields!`, which declares a record of a run as a table. A row has a field, its type, and one rule for each operation
//! of the record. The macro generates the struct and the operations. A row without its rules does not compile, so nobody can
//! forget them for a new field.
//!
//! | operation | method | when | rules |
//! |---|---|---|---|
//! | `part` | `begin_part` | a long life continues in a new run | [`part`] |
//! | `join` | `join` | two runs of one life, in order of time, become one | [`join`] |
//! | `add` | `add` | runs of different processes are summed | [`add`] |
//! | `clip` | `clip` | a run is cut to a window of time | [`clip`] |
//! | `redact` | `redact` | the reader may not see names that the process chose | [`redact`] |
//!
//! Rules are functions: those of the modules below, or a function beside the struct. A record has only the operations that it
//! needs. All its rows list their rules in the same order. Renumbering of cells and memory use need no rules, because [`Field`]
//! derives them from the types. What depends on two fields is computed after the call of the operation.

use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// Declares a record: see the module's documentation.
macro_rules! fields {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $( $(#[$field_meta:meta])* $field:ident: $type:ty $(=> $($operation:ident $rule:expr),+)?; )*
        }
    ) => {
        $(#[$meta])*
        pub struct $name { $( $(#[$field_meta])* pub $field: $type, )* }

        impl $crate::fields::Field for $name {
            fn remap(&mut self, to: &dyn Fn(u32) -> Option<u32>) {
                $( $crate::fields::Field::remap(&mut self.$field, to); )*
            }

            fn heap_bytes(&self) -> usize {
                0 $( + $crate::fields::Field::heap_bytes(&self.$field) )*
            }
        }

        $crate::fields::fields!(@operations $name $( { $field $( $( ($operation $rule) )+ )? } )*);
    };
    (@operations $name:ident $( { $field:ident } )*) => {};
    (@operations $name:ident $( { $field:ident (part $rule:expr) $($rest:tt)* } )*) => {
        #[allow(unused_imports)]
        impl $name {
            /// Reduces counts of a whole life to those of a part; `at_start` holds the counts when the part began.
            pub fn begin_part(&mut self, at_start: &Self) {
                use $crate::fields::part::*;
                $( ($rule)(&mut self.$field, &at_start.$field); )*
            }
        }
        $crate::fields::fields!(@operations $name $( { $field $($rest)* } )*);
    };
    (@operations $name:ident $( { $field:ident (join $rule:expr) $($rest:tt)* } )*) => {
        #[allow(unused_imports)]
        impl $name {
            /// Appends the data of a later run of the same life.
            pub fn join(&mut self, later: Self) {
                use $crate::fields::join::*;
                $( ($rule)(&mut self.$field, later.$field); )*
            }
        }
        $crate::fields::fields!(@operations $name $( { $field $($rest)* } )*);
    };
    (@operations $name:ident $( { $field:ident (add $rule:expr) $($rest:tt)* } )*) => {
        #[allow(unused_imports)]
        impl $name {
            /// Adds the data of another process.
            pub fn add(&mut self, other: &Self) {
                use $crate::fields::add::*;
                $( ($rule)(&mut self.$field, &other.$field); )*
            }
        }
        $crate::fields::fields!(@operations $name $( { $field $($rest)* } )*);
    };
    (@operations $name:ident $( { $field:ident (clip $rule:expr) $($rest:tt)* } )*) => {
        #[allow(unused_imports)]
        impl $name {
            /// Removes everything outside a window of time.
            pub fn clip(&mut self, window: &$crate::fields::Window) {
                use $crate::fields::clip::*;
                $( ($rule)(&mut self.$field, window); )*
            }
        }
        $crate::fields::fields!(@operations $name $( { $field $($rest)* } )*);
    };
    (@operations $name:ident $( { $field:ident (redact $rule:expr) $($rest:tt)* } )*) => {
        #[allow(unused_imports)]
        impl $name {
            /// Removes names that the process chose.
            pub fn redact(&mut self) {
                use $crate::fields::redact::*;
                $( ($rule)(&mut self.$field); )*
            }
        }
        $crate::fields::fields!(@operations $name $( { $field $($rest)* } )*);
    };
}
pub(crate) use fields;

/// A value in a run: operations that follow from its type.
pub trait Field {
    /// Renumbers cells: `to` returns the new index of a cell. Amounts of cells that get the same index are summed; those of a
    /// cell without a new index are dropped.
    fn remap(&mut self, _to: &dyn Fn(u32) -> Option<u32>) {}

    /// Returns the bytes that the value occupies on the heap.
    fn heap_bytes(&self) -> usize {
        0
    }
}

/// Implements [`Field`] for types that refer to no cell and use no heap memory.
macro_rules! plain {
    ($($type:ty),+ $(,)?) => { $( impl $crate::fields::Field for $type {} )+ };
}
pub(crate) use plain;

plain!(bool, u16, u32, u64, i64, i128);

impl Field for String {
    fn heap_bytes(&self) -> usize {
        self.len()
    }
}

impl<T: Field> Field for Option<T> {
    fn remap(&mut self, to: &dyn Fn(u32) -> Option<u32>) {
        self.iter_mut().for_each(|value| value.remap(to));
    }

    fn heap_bytes(&self) -> usize {
        self.as_ref().map_or(0, Field::heap_bytes)
    }
}

impl<T: Field> Field for Vec<T> {
    fn remap(&mut self, to: &dyn Fn(u32) -> Option<u32>) {
        self.iter_mut().for_each(|value| value.remap(to));
    }

    fn heap_bytes(&self) -> usize {
        size_of_val(self.as_slice()) + self.iter().map(Field::heap_bytes).sum::<usize>()
    }
}

impl<A: Field, B: Field> Field for (A, B) {
    fn remap(&mut self, to: &dyn Fn(u32) -> Option<u32>) {
        self.0.remap(to);
        self.1.remap(to);
    }

    fn heap_bytes(&self) -> usize {
        self.0.heap_bytes() + self.1.heap_bytes()
    }
}

impl Field for BTreeMap<String, String> {
    fn heap_bytes(&self) -> usize {
        self.iter().map(|(key, value)| 2 * size_of::<String>() + key.len() + value.len()).sum()
    }
}

/// Appends the items that a list lacks; returns the list's index of each item.
pub fn merge<T: Clone + Eq + Hash>(list: &mut Vec<T>, items: impl IntoIterator<Item = T>) -> Vec<u32> {
    let mut index_of: HashMap<T, u32> = (0..).zip(list.iter()).map(|(at, item)| (item.clone(), at)).collect();
    let mut index = |item: T| {
        *index_of.entry(item).or_insert_with_key(|item| {
            list.push(item.clone());
            list.len() as u32 - 1
        })
    };
    items.into_iter().map(&mut index).collect()
}

/// Rules of operation `part`: a long life continues in a new run.
pub mod part {
    /// Keeps the value, which covers the whole life.
    pub fn carry<T>(_: &mut T, _: &T) {}

    /// Subtracts the count that the process had when this part began.
    pub fn since(now: &mut u64, at_start: &u64) {
        *now = now.saturating_sub(*at_start);
    }
}

/// Rules for two runs of one life, in order of time. Sums saturate, because a stored run may be damaged.
pub mod join {
    /// Adds both counts.
    pub fn sum(earlier: &mut u64, later: u64) {
        *earlier = earlier.saturating_add(later);
    }

    /// Keeps true if either value is true.
    pub fn or(earlier: &mut bool, later: bool) {
        *earlier |= later;
    }

    /// Keeps the greater value.
    pub fn max<T: Ord>(earlier: &mut T, later: T) {
        if later > *earlier {
            *earlier = later;
        }
    }

    /// Keeps the earlier value.
    pub fn first<T>(_: &mut T, _: T) {}

    /// Takes the later value.
    pub fn last<T>(earlier: &mut T, later: T) {
        *earlier = later;
    }

    /// Appends the list of the later run.
    pub fn append<T>(earlier: &mut Vec<T>, later: Vec<T>) {
        earlier.extend(later);
    }
}

/// Rules for the sum of several processes.
pub mod add {
    /// Adds both counts.
    pub fn sum(sum: &mut u64, other: &u64) {
        *sum = sum.saturating_add(*other);
    }

    /// Keeps true if either value is true.
    pub fn or(sum: &mut bool, other: &bool) {
        *sum |= *other;
    }

    /// Keeps the first value that is present.
    pub fn any<T: Clone>(sum: &mut Option<T>, other: &Option<T>) {
        if sum.is_none() {
            sum.clone_from(other);
        }
    }

    /// Leaves the field alone: a sum of processes has no such value.
    pub fn skip<T>(_: &mut T, _: &T) {}
}

/// Rules for a window of time.
pub mod clip {
    use super::{Timed, Window};

    /// Keeps the value unchanged.
    pub fn keep<T>(_: &mut T, _: &Window) {}

    /// Clears the field: its value for a window is unknown.
    pub fn clear<T: Default>(field: &mut T, _: &Window) {
        *field = T::default();
    }

    /// Keeps items that overlap the window.
    pub fn within<T: Timed>(items: &mut Vec<T>, window: &Window) {
        items.retain(|item| {
            let (from_ns, to_ns) = item.time_ns();
            to_ns >= window.from_ns && from_ns <= window.to_ns
        });
    }
}

/// Rules of operation `redact`: the reader may not see names.
pub mod redact {
    /// Keeps the field: it contains no name.
    pub fn keep<T>(_: &mut T) {}

    /// Clears the field, which contains only names.
    pub fn clear<T: Default>(field: &mut T) {
        *field = T::default();
    }

    /// Hides the names in each item.
    pub fn each<T>(hide: impl Fn(&mut T)) -> impl Fn(&mut Vec<T>) {
        move |items| items.iter_mut().for_each(&hide)
    }
}

/// A window of a run's life, in times of the run's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Window {
    pub part: WindowKind,
    /// Begin of the window; for [`WindowKind::At`], the moment.
    pub from_ns: u64,
    pub to_ns: u64,
    /// Whether the recording was read again for this window, so that all sums belong to it and the highest moment is exact.
    pub exact: bool,
}

/// Kind of a window. It decides which amounts the two columns of a report show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WindowKind {
    /// One time: the second column shows the amounts at this time; the first still shows the last moment.
    At,
    /// From a time to the end of the run, or to now: the second column shows the highest moment in the window.
    Since,
    /// Between two times: the second column shows the highest moment in the window, the first the amounts at the window's end.
    Between,
}

impl Window {
    pub fn has(&self, time_ns: u64) -> bool {
        (self.from_ns..=self.to_ns).contains(&time_ns)
    }
}

/// An item of a list that [`clip::within`] cuts to a window.
pub trait Timed {
    /// Returns begin and end of the item (ns).
    fn time_ns(&self) -> (u64, u64);
}
