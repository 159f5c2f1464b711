//! Formats bytes for people: one unit for each table, and rounded amounts that still add up.

/// The unit in which all amounts of a table are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unit {
    /// Name, printed once for the table.
    pub name: &'static str,
    bytes: i64,
    decimals: u32,
}

impl Unit {
    /// Returns the unit for a table whose largest amount is `bytes`: bytes below 10 KiB, KiB below 10 MiB, else MiB.
    pub fn for_largest(bytes: i64) -> Self {
        const KIB: i64 = 1 << 10;
        const MIB: i64 = 1 << 20;
        match bytes.saturating_abs() {
            bytes if bytes >= 10_000 * MIB => Unit { name: "MiB", bytes: MIB, decimals: 0 },
            bytes if bytes >= 10 * MIB => Unit { name: "MiB", bytes: MIB, decimals: 1 },
            bytes if bytes >= 10 * KIB => Unit { name: "KiB", bytes: KIB, decimals: 1 },
            _ => Unit { name: "bytes", bytes: 1, decimals: 0 },
        }
    }

    /// Returns the unit for a chart's axis: the largest unit of which `bytes` is at least four.
    pub fn for_axis(bytes: i64) -> Self {
        const UNITS: [(&str, u32, u32); 4] =
            [("GiB", 30, 2), ("MiB", 20, 1), ("KiB", 10, 1), ("bytes", 0, 0)];
        let (name, power, decimals) =
            UNITS.into_iter().find(|(_, power, _)| bytes >> power >= 4).unwrap_or(UNITS[3]);
        Unit { name, bytes: 1 << power, decimals }
    }

    /// Returns a unit in which [`Unit::apportion`] divides a total: one step is a thousandth of `total_bytes`. Not for printing.
    pub fn for_shares(total_bytes: i64) -> Self {
        Unit { name: "%", bytes: total_bytes, decimals: 3 }
    }

    /// Returns the number of bytes in one unit.
    pub fn bytes(self) -> i64 {
        self.bytes
    }

    /// Returns the bytes of one step of the last printed digit, as numerator and denominator: 0.1 MiB is not a whole number of
    /// bytes.
    pub fn step(self) -> (i64, i64) {
        (self.bytes, 10_i64.pow(self.decimals))
    }

    /// Rounds bytes to the nearest step of the last printed digit.
    pub fn round(self, bytes: i64) -> i64 {
        let (unit, parts) = self.step();
        let scaled = i128::from(bytes) * i128::from(parts);
        let unit = i128::from(unit);
        (scaled + unit / 2).div_euclid(unit) as i64
    }

    /// Rounds `parts` (bytes) to steps that sum to `total`, which is the sum of the parts, rounded to steps. All parts are rounded
    /// down first; then those with the largest remainders get one step more.
    pub fn apportion(self, total: i64, parts: &[i64]) -> Vec<i64> {
        let (unit, scale) = self.step();
        let (unit, scale) = (i128::from(unit), i128::from(scale));
        let scaled = parts.iter().map(|&bytes| i128::from(bytes) * scale);
        let mut steps: Vec<(i64, i128)> =
            scaled.map(|scaled| (scaled.div_euclid(unit) as i64, scaled.rem_euclid(unit))).collect();
        let mut missing = i128::from(total) - steps.iter().map(|(steps, _)| i128::from(*steps)).sum::<i128>();
        let mut order: Vec<usize> = (0..parts.len()).collect();
        order.sort_by_key(|&index| (std::cmp::Reverse(steps[index].1), index));
        for &index in order.iter().cycle().take(parts.len() * 2) {
            if missing <= 0 {
                break;
            }
            steps[index].0 += 1;
            missing -= 1;
        }
        steps.into_iter().map(|(steps, _)| steps).collect()
    }

    /// Formats an amount that is given in steps of the last printed digit.
    pub fn print(self, steps: i64) -> String {
        let scale = 10_i64.pow(self.decimals);
        let whole = thousands((steps / scale).unsigned_abs());
        let sign = if steps < 0 { "-" } else { "" };
        match self.decimals {
            0 => format!("{sign}{whole}"),
            decimals => format!("{sign}{whole}.{:0width$}", (steps % scale).abs(), width = decimals as usize),
        }
    }

    /// Returns the smallest positive amount (bytes) that does not print as zero.
    pub fn smallest(self) -> i64 {
        let (unit, scale) = self.step();
        (unit + 2 * scale - 1) / (2 * scale)
    }

    /// Formats a single amount without its unit.
    pub fn amount(self, bytes: i64) -> String {
        self.print(self.round(bytes))
    }

    /// Formats a single amount with its unit: `1.5 MiB`.
    pub fn amount_with_name(self, bytes: i64) -> String {
        format!("{} {}", self.amount(bytes), self.name)
    }

    /// Like [`Unit::print`], with `+` before positive amounts.
    pub fn print_signed(self, steps: i64) -> String {
        let plus = if steps > 0 { "+" } else { "" };
        plus.to_owned() + &self.print(steps)
    }
}

/// Converts bytes to a signed number; saturates at the largest value.
pub fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Formats a number with a comma every three digits.
pub fn thousands(number: impl Into<i128>) -> String {
    let number = number.into();
    let digits = number.unsigned_abs().to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if number < 0 { format!("-{text}") } else { text }
}

/// Formats a count with its noun: `1 line`, `2,000 lines`.
pub fn plural(number: u64, what: &str) -> String {
    let ending = match number {
        1 => "",
        _ if what.ends_with('s') => "es",
        _ => "s",
    };
    thousands(number) + " " + what + ending
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounded_parts_add_up_to_the_rounded_total() {
        let unit = Unit::for_largest(100 << 20);
        let third = (100 << 20) / 3;
        let parts = [third, third, (100 << 20) - 2 * third];
        assert_eq!(unit.apportion(unit.round(100 << 20), &parts), [333, 333, 334]);
        let parts = [-(5 << 20) - 1, (105 << 20) + 1];
        assert_eq!(unit.apportion(1000, &parts).iter().sum::<i64>(), 1000);
    }

    #[test]
    fn numbers_are_printed_in_one_unit() {
        assert_eq!(Unit::for_largest(71_204 << 20).amount(71_204 << 20), "71,204");
        assert_eq!(Unit::for_largest(592 << 20).amount(621_176_421), "592.4");
        assert_eq!(Unit::for_largest(592 << 20).amount(-(1 << 19)), "-0.5");
        assert_eq!(Unit::for_largest(1000).amount(-999), "-999");
        assert_eq!(thousands(-1_234_567), "-1,234,567");
        assert_eq!(thousands(u64::MAX), "18,446,744,073,709,551,615");
        assert_eq!(thousands(i64::MIN), "-9,223,372,036,854,775,808");
        assert_eq!([0, 1, 2000].map(|lines| plural(lines, "line")), ["0 lines", "1 line", "2,000 lines"]);
    }
}
