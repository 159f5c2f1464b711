//! What can be typed of `top`.

use super::SocketPath;
use clap::Args;
use std::time::Duration;

#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Top {
    /// Begin with this process in depth
    pub pid: Option<u32>,
    /// Look so often: 0.1 to 3600 seconds
    #[arg(short, long, value_name = "SECONDS", default_value = "2", value_parser = interval)]
    pub interval: Duration,
    /// Only this device: NVML's index, or the beginning of its UUID
    #[arg(long, value_name = "N|UUID")]
    pub device: Option<String>,
    /// Print one frame; so does a pipe
    #[arg(long)]
    pub once: bool,
    #[command(flatten)]
    pub socket: SocketPath,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.trim_end_matches('s').parse().ok();
    let fits = seconds.filter(|seconds| (0.1..=3600.0).contains(seconds));
    fits.map(Duration::from_secs_f64).ok_or_else(|| "an interval is 0.1 to 3600 seconds".to_owned())
}
