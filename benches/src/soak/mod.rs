//! Soaks: a real server, clients that remember what it acknowledged, and what must not hurt.
//!
//! ```text
//! arguments -> kill: target   the server, on one directory and behind the same ports
//!                    worker   clients: actions while it lives, recover when it is back
//!                    model    what a file may hold after a death, block by block
//!                    matter   what is written
//!              load: the same clients, hundreds of them; hostile: what must not hurt them
//!              verdict        progress, figures, JSON
//! ```

mod actions;
mod arguments;
mod chance;
mod hostile;
mod kill;
mod load;
mod matter;
mod model;
mod recover;
mod target;
mod trouble;
mod verdict;
mod worker;

pub(crate) use arguments::SoakCommand;

use crate::failure::Failure;

/// Runs a soak; answers whether nothing was lost.
pub(crate) fn run(command: &SoakCommand) -> Result<bool, Failure> {
    match command {
        SoakCommand::Kill(arguments) => kill::run(arguments),
        SoakCommand::Load(arguments) => load::run(arguments),
    }
}
