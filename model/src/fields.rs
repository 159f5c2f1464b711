//! One table for each record of a run. A row names a field, its type and one rule for each operation of the record; the macro makes the
//! struct and the operations. A row without a rule does not compile, so a new field is decided where it is declared.
//!
//! | operation | method | question | rules |
//! |---|---|---|---|
//! | `part` | `begin_part` | A long life goes on in a new run: with what does the field begin? | [`part`] |
//! | `join` | `join` | Two runs are of one life, one after the other: what is the field of both? | [`join`] |
//! | `add` | `add` | Two runs are of different processes: what is the field of their sum? | [`add`] |
//! | `clip` | `clip` | Only a window of time is wanted: what is left of the field? | [`clip`] |
//! | `redact` | `redact` | The reader may not see names: what is left of the field? | [`redact`] |
//!
//! Rules are functions; a field with a rule of its own names a function beside its struct. A record has the operations that it needs, and
//! each of its rows has a rule for each of them, in the same order. Renumbering of cells and weight are no decisions: [`Field`] follows
//! from the types. Decisions over two fields stand after the call of the operation.

use serde::Serialize;
use std::collections::BTreeMap;

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
            /// Makes counts of a life those of the part that began when they were `at_start`.
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
            /// Appends what a later run of the same life has.
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
            /// Adds what another process has.
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
            /// Leaves what belongs to a window of time.
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
            /// Removes what the process calls things.
            pub fn redact(&mut self) {
                use $crate::fields::redact::*;
                $( ($rule)(&mut self.$field); )*
            }
        }
        $crate::fields::fields!(@operations $name $( { $field $($rest)* } )*);
    };
}
pub(crate) use fields;

/// A value in a run.
pub trait Field {
    /// Gives cells the indices that `to` returns. Amounts of cells that become one are summed; those of a cell that has no new
    /// index are left out.
    fn remap(&mut self, _to: &dyn Fn(u32) -> Option<u32>) {}

    /// Bytes that the value has on the heap.
    fn heap_bytes(&self) -> usize {
        0
    }
}

/// Types that name no cell and have nothing on the heap.
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

/// Rules for the begin of a part.
pub mod part {
    /// Goes on as it is.
    pub fn carry<T>(_: &mut T, _: &T) {}

    /// Counts from the beginning of the part.
    pub fn since(now: &mut u64, at_start: &u64) {
        *now = now.saturating_sub(*at_start);
    }
}

/// Rules for two runs of one life, one after the other. Sums saturate, because a stored run may be damaged.
pub mod join {
    /// Counts of both.
    pub fn sum(earlier: &mut u64, later: u64) {
        *earlier = earlier.saturating_add(later);
    }

    /// True if it is of either.
    pub fn or(earlier: &mut bool, later: bool) {
        *earlier |= later;
    }

    /// The greater one.
    pub fn max<T: Ord>(earlier: &mut T, later: T) {
        if later > *earlier {
            *earlier = later;
        }
    }

    /// As it was.
    pub fn first<T>(_: &mut T, _: T) {}

    /// As it is now.
    pub fn last<T>(earlier: &mut T, later: T) {
        *earlier = later;
    }

    /// One list after the other.
    pub fn append<T>(earlier: &mut Vec<T>, later: Vec<T>) {
        earlier.extend(later);
    }
}

/// Rules for the sum of several processes.
pub mod add {
    /// Counts of both.
    pub fn sum(sum: &mut u64, other: &u64) {
        *sum = sum.saturating_add(*other);
    }

    /// True if it is of any.
    pub fn or(sum: &mut bool, other: &bool) {
        *sum |= *other;
    }

    /// The first that is there.
    pub fn any<T: Clone>(sum: &mut Option<T>, other: &Option<T>) {
        if sum.is_none() {
            sum.clone_from(other);
        }
    }

    /// True of one process and of no sum.
    pub fn skip<T>(_: &mut T, _: &T) {}
}

/// Rules for a window of time.
pub mod clip {
    use super::{Timed, Window};

    /// Stays as it is.
    pub fn keep<T>(_: &mut T, _: &Window) {}

    /// Not known of a window.
    pub fn clear<T: Default>(field: &mut T, _: &Window) {
        *field = T::default();
    }

    /// Items that lie in the window at least in part.
    pub fn within<T: Timed>(items: &mut Vec<T>, window: &Window) {
        items.retain(|item| {
            let (from_ns, to_ns) = item.time_ns();
            to_ns >= window.from_ns && from_ns <= window.to_ns
        });
    }
}

/// Rules for readers who may not see names.
pub mod redact {
    /// Not a name.
    pub fn keep<T>(_: &mut T) {}

    /// All of it are names.
    pub fn clear<T: Default>(field: &mut T) {
        *field = T::default();
    }

    /// Hides names in each item.
    pub fn each<T>(hide: impl Fn(&mut T)) -> impl Fn(&mut Vec<T>) {
        move |items| items.iter_mut().for_each(&hide)
    }
}

/// Which part of a life is wanted, in times of the run's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Window {
    /// Which columns of a report it cuts.
    pub part: WindowKind,
    /// Its begin; of a moment, the moment.
    pub from_ns: u64,
    /// Its end.
    pub to_ns: u64,
    /// The run was read again for it: every sum is that of its own time, and the highest moment is exact.
    pub exact: bool,
}

/// Which columns of a report a window cuts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WindowKind {
    /// A moment: the second column is what was held then, the first is the last one, as always.
    At,
    /// Up to the end, or to now: the second column is the highest moment in it.
    Since,
    /// Up to a time before that: so is the second one, and the first is its end.
    Between,
}

impl Window {
    /// Whether a time lies in it.
    pub fn has(&self, time_ns: u64) -> bool {
        (self.from_ns..=self.to_ns).contains(&time_ns)
    }
}

/// An item with a place in time.
pub trait Timed {
    /// When it began and when it was over.
    fn time_ns(&self) -> (u64, u64);
}
