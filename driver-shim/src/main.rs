//! `slackwater-driver`: the daemon that a worker runs beside Docker and containerd, and the
//! commands that look after it.

use std::process::ExitCode;

fn main() -> ExitCode {
    slackwater_driver::command::main(std::env::args_os())
}
