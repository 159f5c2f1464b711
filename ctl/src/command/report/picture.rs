//! `gpumemctl report --svg|--pdf|--png`: what is asked for as one picture.

use super::{Found, What, found, report, several};
use crate::args::{Plot, Report as Args};
use anyhow::Result;
use gpumem_model::run::Run;
use gpumem_model::window::Window;
use gpumem_report::Report;
use gpumem_report::plot::{Options, Picture, draw as drawn};

/// The picture's file.
pub(crate) fn draw(args: &Args) -> Result<Vec<u8>> {
    let mut runs: Vec<(Option<String>, Run, Option<Window>)> = Vec::new();
    for alone in several::alone(args) {
        let Found { what, .. } = found(&alone)?;
        match what {
            What::One(one) => runs.push((one.id, one.run, one.window)),
            What::Group(_, group) => runs.extend(group.into_iter().map(|run| (None, run, None))),
        }
    }
    let mut reports: Vec<Report<'_>> = Vec::new();
    for (id, run, window) in &runs {
        let mut report = report(run, args)?;
        report.id.clone_from(id);
        report.window = *window;
        reports.push(report);
    }
    let usual = if reports.len() > 1 { Plot::Compare } else { Plot::Peak };
    let picture: Picture = args.picture.plot.unwrap_or(usual).into();
    let options = Options { title: args.picture.title.clone(), hide_below: args.picture.hide_below };
    let drawing = drawn(&reports, picture, &options)?;
    Ok(match (args.picture.svg, args.picture.pdf) {
        (true, _) => drawing.svg().into_bytes(),
        (_, true) => drawing.pdf(),
        _ => drawing.png()?,
    })
}
