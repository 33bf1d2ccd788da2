//! How many heaps ("arenas") the C library's allocator keeps.
//!
//! glibc has up to eight a processor, so that threads do not wait for each other, and what is free in
//! one serves no other. Blocks of the caches are taken by one thread and given back by another, and the
//! process grows past its budget (DECISIONS.md, 66). glibc reads the number once, before `main`: who
//! wants another begins once more with it.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Read by glibc, see mallopt(3).
const VARIABLE: &str = "MALLOC_ARENA_MAX";

/// One for what is served, one for what is beside it: measured, more grow and gain nothing.
const HEAPS: &str = "2";

/// Says that this is the second begin. glibc takes its own variable away from a program that has
/// capabilities of its file.
const BEGUN_ANEW: &str = "SLACKWATERD_HEAPS_SET";

/// Begins the process anew with few heaps, the same in all else: it keeps its number, its arguments
/// and what it inherited. Returns the second time, where the number was chosen by somebody else, and
/// if it cannot begin anew: then more memory is needed.
pub fn limit() {
    if [VARIABLE, BEGUN_ANEW].iter().any(|name| std::env::var_os(name).is_some()) {
        return;
    }
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_else(|| OsString::from("slackwaterd"));
    let error = match std::env::current_exe() {
        Ok(program) => Command::new(program)
            .arg0(name)
            .args(arguments)
            .env(VARIABLE, HEAPS)
            .env(BEGUN_ANEW, "1")
            .exec(),
        Err(error) => error,
    };
    let _ = writeln!(
        std::io::stderr(),
        "slackwaterd: warning: memory may grow past its budget, as {VARIABLE} could not be set: {error}"
    );
}
