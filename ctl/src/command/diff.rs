//! `gpumemctl diff A B`: differences of B from A, and whether they are within a limit.

use crate::args::Diff as Args;
use crate::args::{names_device, no_device};
use crate::command::report;
use crate::exit::Kind;
use crate::output::{deliver, width};
use anyhow::Result;
use gpumem_report::diff::gate::{self, Of, Outcome, Verdict};
use gpumem_report::diff::text::{Layout, text};
use gpumem_report::diff::{At, Diff, Side, data};
use gpumem_report::rules::Groupings;
use gpumem_report::text::escape;

/// Compares two runs. If B exceeds the limit of `--fail-above`, the comparison is printed nevertheless, before the error.
pub(crate) fn run(args: &Args) -> Result<()> {
    let side = |name: &str| report::summed(&args.side(name), args.job);
    let [mut a, b] = [side(&args.a)?, side(&args.b)?];
    if args.job {
        a.2 = format!("--job {}", a.2);
    }
    let sides = [&a, &b].map(|(run, id, typed)| Side { run, id: id.clone(), typed: typed.clone() });
    let groupings = args.rules.as_deref().map(Groupings::load).transpose()?;
    let at = if args.now { At::Now } else { At::Peak };
    let mut diff = Diff::new(sides, at, groupings, args.by);
    if let Some(device) = &args.device
        && !diff.only(|of| names_device(device, of.ordinal.into(), &of.name))
    {
        let known = diff.sides.iter().flat_map(|side| &side.run.devices);
        let known = known.map(|of| (u32::from(of.ordinal), of.name.clone()));
        return Err(no_device(device, "is not one of the devices compared", known));
    }
    let verdict = verdict(&diff, args)?;
    let output = if args.json {
        data::json(&diff, verdict.as_ref()).into_bytes()
    } else if args.csv {
        data::csv(&diff).into_bytes()
    } else if args.svg || args.pdf || args.png {
        let drawing = data::picture(&diff);
        let none = || Kind::NotFound.error("neither A nor B has memory on a GPU: there is nothing to draw");
        report::file_of(&drawing.ok_or_else(none)?, args.svg, args.pdf)?
    } else {
        let width = if args.output.path().is_some() { None } else { width() };
        text(&diff, Layout { width, all: args.all, tags: args.tags }).into_bytes()
    };
    deliver(&output, &args.output)?;
    match verdict {
        Some(Verdict { outcome: Outcome::Above, text, .. }) => Err(Kind::Above.error(text)),
        Some(Verdict { outcome: Outcome::Unknown, text, .. }) => Err(Kind::Undecided.error(text)),
        _ => Ok(()),
    }
}

/// Returns whether the amount of `--of` is within the limit of `--fail-above`; `None` without a limit.
fn verdict(diff: &Diff<'_>, args: &Args) -> Result<Option<Verdict>> {
    let Some(limit) = args.fail_above else { return Ok(None) };
    let of = match &args.of {
        None => Of::Peak,
        Some(word) => Of::find(word, diff).ok_or_else(|| {
            let known = Of::words(diff).join(", ");
            Kind::NotFound.error(format!(
                "--of {}: neither run has anything of that name; there are: {known}",
                escape(word)
            ))
        })?,
    };
    Ok(Some(gate::judge(diff, &of, limit)))
}
