//! The test's own program as the one that becomes a tool in its sandbox. The harness of tests takes
//! no words of ours: they come in the environment, and what it prints goes elsewhere.

use std::ffi::OsString;
use std::fs::File;

/// The words of a tool, one on a line, where this program is to become one.
const WORDS: &str = "SLACKWATER_TEST_TOOL_WORDS";

/// For `Options::tool_program`. `test` is the full name of one that calls `become_one`.
pub(crate) fn program(test: &str) -> Vec<OsString> {
    let become_one = format!(
        "{WORDS}=$(printf '%s\\n' \"$@\"); export {WORDS}
         exec \"$0\" --exact {test} --nocapture 3>&1 >/dev/null"
    );
    vec!["sh".into(), "-c".into(), become_one.into(), std::env::current_exe().unwrap().into()]
}

/// Becomes a tool where that is asked for; else returns.
pub(crate) fn become_one(run_tool: fn(&[OsString]) -> u8) {
    let Some(words) = std::env::var_os(WORDS) else { return };
    let words: Vec<OsString> = words.to_str().unwrap().lines().map(OsString::from).collect();
    let output = File::options().write(true).open("/proc/self/fd/3").unwrap();
    rustix::stdio::dup2_stdout(output).unwrap();
    std::process::exit(run_tool(&words).into());
}
