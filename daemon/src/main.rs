//! gpumemd.

fn main() -> std::process::ExitCode {
    let mut args = std::env::args_os().skip(1);
    if args.next().is_some_and(|word| word == "nvml-poller") {
        return gpumemd::source::nvml::poller_main(args);
    }
    std::process::ExitCode::SUCCESS
}
