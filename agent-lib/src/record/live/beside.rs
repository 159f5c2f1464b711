//! What lies beside a row.

/// What the record has no place for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Beside {
    /// First tag; the row's own is the latest. Meaningful if `RETAGGED`.
    pub first_tag: u32,
    /// Role and phase as in `Retag`, of rows that have no place for it.
    pub use_as: u8,
    /// See the constants.
    pub flags: u8,
    /// VMM: references of the handle. Imports: how often it was opened.
    pub references: u32,
    /// VMM: live mappings of the handle.
    pub mappings: u32,
    /// VMM mappings: seq of the handle's row.
    pub backing: u64,
}

impl Beside {
    /// It was retagged at least once.
    pub const RETAGGED: u8 = 1;
    /// A block that its owner has freed and a stream may still use.
    pub const PENDING: u8 = 2;

    pub(super) fn words(self) -> [u64; 3] {
        let first = u64::from(self.first_tag) | u64::from(self.use_as) << 32 | u64::from(self.flags) << 40;
        [first, u64::from(self.references) | u64::from(self.mappings) << 32, self.backing]
    }

    pub(super) fn from_words([first, counts, backing]: [u64; 3]) -> Self {
        Beside {
            first_tag: first as u32,
            use_as: (first >> 32) as u8,
            flags: (first >> 40) as u8,
            references: counts as u32,
            mappings: (counts >> 32) as u32,
            backing,
        }
    }
}
