//! exec(): the process becomes another program. Its memory is freed, and the new program's agent counts records from 1 and
//! assigns its own ids to names. Pid and start time stay.

use crate::history::trend::{GapTrend, Trends};
use crate::process::{NO_BOOK, Process};
use crate::untrackable::event::{Event, What};
use gpumem_model::run::Program;
use gpumem_wire::{Body, Record};

/// Number of bits of the agent's own tag ids. The bits above them contain the number of the program, so that the ids of several
/// programs of a process differ. An agent uses far fewer ids.
const TAG_BITS: u32 = 24;
/// Like [`TAG_BITS`], for ids of modules.
const MODULE_BITS: u32 = 12;
/// Maximum number of programs that are kept; the first and the latest stay.
const MAX_PROGRAMS: usize = 8;

impl Process {
    /// Handles the `Hello` record of program `instance`, which may be another program than the one before (exec).
    pub fn begin_program(&mut self, instance: u16, hello: &Record<'_>) {
        let programs = &mut self.coverage.programs;
        if programs.last().is_some_and(|program| program.instance == instance) {
            return;
        }
        if let Some(last) = programs.last_mut() {
            last.heard = self.stream.last_seq;
        }
        if programs.len() == MAX_PROGRAMS {
            programs.remove(1);
        }
        programs.push(Program { instance, heard: 0 });
        if programs.len() == 1 {
            return;
        }
        self.stream.programs_before = self.stream.programs_before.wrapping_add(1);
        self.holdings.remove_all();
        self.end_resync_of_program();
        self.growth = Trends::default();
        self.accounts.iter_mut().for_each(|account| account.gaps = GapTrend::default());
        self.holdings.reset_phases(self.stream.applied_ns);
        self.ooms.stacks.clear(); // the new program has its own stack ids
        self.program.ranges.lose(); // open ranges have no end
        self.slots = [NO_BOOK; 256];
        let event = Event::of(&hello.stamp, hello.stamp.time_ns, What::Exec);
        self.accounts.iter_mut().for_each(|account| account.causes.note_event(event));
    }

    /// Returns the record with ids that are unique among all programs of the process.
    pub fn shifted_ids<'a>(&self, record: &Record<'a>) -> Record<'a> {
        let mut record = *record;
        let name =
            |id: u32| if id == 0 { 0 } else { id | u32::from(self.stream.programs_before) << TAG_BITS };
        record.stamp.tag = name(record.stamp.tag);
        if matches!(record.body, Body::Retag { .. }) {
            record.stamp.stack = name(record.stamp.stack); // in a retag this is the first tag
        }
        if record.stamp.module != 0 {
            record.stamp.module |= self.stream.programs_before << MODULE_BITS;
        }
        record
    }
}
