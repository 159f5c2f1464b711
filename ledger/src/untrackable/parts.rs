//! What an untrackable, or a change of it, is made of.

/// Parts of an untrackable, in bytes; signed, never clamped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Parts {
    /// What creating contexts cost.
    pub context: i64,
    /// Code and globals of modules.
    pub modules: i64,
    /// Stacks of kernels.
    pub local_memory: i64,
    /// The FIFO of printf and the heap of malloc on the device.
    pub heaps: i64,
    /// What the driver adds to the sizes that were asked for.
    pub rounding: i64,
    /// The rest.
    pub unexplained: i64,
}

impl Parts {
    /// The untrackable, or the step, that they are the parts of.
    pub fn sum(&self) -> i64 {
        let Parts { context, modules, local_memory, heaps, rounding, unexplained } = *self;
        let all = [context, modules, local_memory, heaps, rounding, unexplained];
        all.iter().fold(0, |sum, bytes| sum.wrapping_add(*bytes))
    }

    fn combine(self, other: Parts, with: fn(i64, i64) -> i64) -> Parts {
        Parts {
            context: with(self.context, other.context),
            modules: with(self.modules, other.modules),
            local_memory: with(self.local_memory, other.local_memory),
            heaps: with(self.heaps, other.heaps),
            rounding: with(self.rounding, other.rounding),
            unexplained: with(self.unexplained, other.unexplained),
        }
    }

    pub(crate) fn plus(self, other: Parts) -> Parts {
        self.combine(other, i64::wrapping_add)
    }

    pub(crate) fn minus(self, other: Parts) -> Parts {
        self.combine(other, i64::wrapping_sub)
    }
}
