//! The comparison as a picture: the bars of A and B on one scale, with the same colour for the same category.

use super::text::Shown;
use super::{Diff, Pair, SIDES, summary};
use crate::labels::label;
use crate::plot::{Bar, Drawing, Frame, Kind, Segment, bars, by_name};
use crate::{By, Part};
use gpumem_model::escape::escape;

/// Returns the picture. Each bar adds up to `used`, or to the known part of `used`. `None` if neither run has memory on a GPU.
pub fn picture(diff: &Diff<'_>) -> Option<Drawing> {
    let pair = diff.whole()?;
    let shown = Shown::of(pair.table(diff.by), usize::MAX);
    let title = |side: usize| {
        let told = diff.sides.get(side)?;
        let id = told.id.as_ref().map(|id| format!(" {id}")).unwrap_or_default();
        Some(format!("{}  {}{id}", SIDES.get(side)?, label(told.run)))
    };
    let both = [0, 1].map(|side| bar(pair, diff.by, side, title(side).unwrap_or_default()));
    let heading = diff.sides.each_ref().map(|side| match &side.id {
        Some(id) => format!("{} {id}", label(side.run)),
        None => label(side.run),
    });
    let frame = Frame {
        title: heading.join(" and "),
        lines: vec![
            escape(&summary::sentence(diff, pair, &shown)),
            format!("{}; {}", summary::basis(diff), by_name(diff.by)),
        ],
        notes: summary::shift(&shown).into_iter().chain(summary::doubts(pair)).collect(),
    };
    Some(frame.around(vec![bars(&both)], 1))
}

fn bar(pair: &Pair, by: By, side: usize, title: String) -> Bar {
    let mut segments = Vec::new();
    let mut push = |name: String, bytes: i64, kind: Kind| {
        if bytes != 0 {
            segments.push(Segment { name, bytes, kind });
        }
    };
    let moment = pair.moments.get(side);
    if let Some(moment) = moment.filter(|moment| moment.tracked_bytes.is_none()) {
        let name = "used (no agent)".to_owned();
        push(name, moment.used_bytes().unwrap_or(0), Kind::Opaque);
    }
    for row in &pair.table(by).statement.rows {
        let Some(Some(bytes)) = row.bytes.get(side).copied() else { continue };
        match row.part {
            Part::Category => push(escape(&row.name), bytes, Kind::Category),
            Part::Others => push(by.name_of_rest().to_owned(), bytes, Kind::Others),
            Part::PoolIdle => push("pool idle".to_owned(), bytes, Kind::Idle),
            Part::Opaque => push("opaque pools".to_owned(), bytes, Kind::Opaque),
            Part::Predates => push("predates the agent".to_owned(), bytes, Kind::Predates),
            Part::Untrackable => push("Untrackable".to_owned(), bytes, Kind::Untrackable),
            _ => {}
        }
    }
    Bar::of(title, segments)
}
