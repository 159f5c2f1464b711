//! Arguments for a part of a run's life, pictures and traces.

use crate::when::When;
use clap::Args;
use gpumem_report::plot::Picture as Plot;

/// A part of the run's life.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Window {
    /// From this time on: 90s, 1h30m or 2d ago, 10:30, a date and time, or a mark
    #[arg(long, value_name = "TIME", group = "window", conflicts_with = "job", help_heading = "Filter")]
    pub since: Option<When>,
    /// Composition at this time, beside the latest
    #[arg(long, value_name = "TIME", group = "window", conflicts_with = "job", help_heading = "Filter")]
    pub at: Option<When>,
    /// From one time to another
    #[arg(long, value_name = "A,B", group = "window", conflicts_with = "job", value_parser = crate::when::two, help_heading = "Filter")]
    pub between: Option<(When, When)>,
}

/// A picture instead (docs/pictures.md).
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Picture {
    /// Draw a picture as SVG
    #[arg(long, groups = ["form", "drawn"], conflicts_with_all = ["steps", "growth", "iterations", "counters"], help_heading = "Format")]
    pub svg: bool,
    /// Draw a picture as PDF
    #[arg(long, groups = ["form", "drawn"], conflicts_with_all = ["steps", "growth", "iterations", "counters"], help_heading = "Format")]
    pub pdf: bool,
    /// Draw a picture as PNG
    #[arg(long, groups = ["form", "drawn"], conflicts_with_all = ["steps", "growth", "iterations", "counters"], help_heading = "Format")]
    pub png: bool,
    /// Kind of picture [default: peak; for several runs compare]
    #[arg(long, value_name = "WHAT", requires = "drawn", value_parser = super::words(PLOTS), help_heading = "Format")]
    pub plot: Option<Plot>,
    /// Title of the picture
    #[arg(long, value_name = "TEXT", requires = "drawn", help_heading = "Format")]
    pub title: Option<String>,
    /// Merge categories of at most this share
    #[arg(long, value_name = "PERCENT", requires = "drawn", value_parser = super::typed::percent, help_heading = "Format")]
    pub hide_below: Option<f64>,
}

impl Picture {
    pub(crate) fn is_asked(&self) -> bool {
        self.svg || self.pdf || self.png
    }
}

/// Values of `--plot`: word, description and kind of picture.
const PLOTS: [(&str, &str, Plot); 4] = [
    ("peak", "Layers and data structures at the peak, as two stacked bars", Plot::Peak),
    ("categories", "One bar for each category at the peak", Plot::Categories),
    ("timeline", "Memory over time", Plot::Timeline),
    ("compare", "The peaks of several runs side by side", Plot::Compare),
];

/// For other tools (docs/pictures.md).
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Traced {
    /// Write a trace for Perfetto and chrome://tracing
    #[arg(long, group = "form", conflicts_with_all = ["steps", "growth", "iterations", "counters"], help_heading = "Format")]
    pub chrome_trace: bool,
    /// Write the peak as collapsed stacks for flame graphs: frames;of;a;path bytes
    #[arg(long, group = "form", conflicts_with_all = ["steps", "growth", "iterations", "counters"], help_heading = "Format")]
    pub collapsed: bool,
    /// Write the peak as nested JSON for treemaps: {name, children} or {name, value}
    #[arg(long, group = "form", conflicts_with_all = ["steps", "growth", "iterations", "counters"], help_heading = "Format")]
    pub treemap: bool,
}

impl Traced {
    pub(crate) fn is_asked(&self) -> bool {
        self.chrome_trace || self.collapsed || self.treemap
    }
}
