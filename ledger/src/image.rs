//! exec(): the process becomes another program. Pid and start time stay, everything else begins again: its
//! memory is gone, the new agent counts from 1 and gives its own numbers to names.

use crate::process::{NO_BOOK, Process};
use gpumem_wire::{Body, Record};

/// Ids of names of the n-th program have n in the bits from here on; an agent introduces far fewer.
const TAG_BITS: u32 = 24;
/// The same for modules.
const MODULE_BITS: u32 = 12;

impl Process {
    /// An agent says hello as the program `instance`. Whether that is another one than before.
    pub fn enter_image(&mut self, instance: u16) -> bool {
        if self.instance.replace(instance).is_none_or(|known| known == instance) {
            return false;
        }
        self.image = self.image.wrapping_add(1);
        self.holdings.take_everything();
        self.end_resync_of_image();
        self.forget_trends();
        self.holdings.forget_phases(self.applied_ns);
        self.ooms.forget_stacks();
        self.slots = [NO_BOOK; 256];
        true
    }

    /// The record with ids that no earlier program of the process has used.
    pub fn in_image<'a>(&self, record: &Record<'a>) -> Record<'a> {
        let mut record = *record;
        let name = |id: u32| if id == 0 { 0 } else { id | u32::from(self.image) << TAG_BITS };
        record.stamp.tag = name(record.stamp.tag);
        if matches!(record.body, Body::Retag { .. }) {
            record.stamp.stack = name(record.stamp.stack); // there it is the first tag
        }
        if record.stamp.module != 0 {
            record.stamp.module |= self.image << MODULE_BITS;
        }
        record
    }
}
