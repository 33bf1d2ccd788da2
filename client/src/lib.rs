//! The client library of the Slackwater appliance: one method for each route of its REST face,
//! typed errors, and retries of the calls that can be sent again without harm.
//!
//! ```text
//! files snapshots data workers care    one method a route: what is asked, what is answered
//!            |
//!        transport             one logical call: attempts, time limits, answer limits
//!         |     |
//!      retry   error           when to try again            what went wrong, what to do
//!
//! rpc_tls                     how the same appliance is known by NFS in TLS
//! ```
//!
//! A call is sent again only where that cannot do harm: `GET`, `DELETE`, a `PUT` of bytes at an
//! offset, and a `POST`, which carries an idempotency key made once for the logical call. A
//! `PATCH` is sent again only if the first try never reached the appliance.
//!
//! ```no_run
//! # async fn example() -> Result<(), slackwater_client::ClientError> {
//! use slackwater_client::{Client, types::CreateSnapshot};
//!
//! let client = Client::builder("http://127.0.0.1:8049").build()?;
//! let request = CreateSnapshot { path: "images/debian.img".into(), ..Default::default() };
//! let snapshot = client.create_snapshot(&request).await?;
//! client.create_clone(snapshot.id, "disks/web-1.img").await?;
//! # Ok(())
//! # }
//! ```

mod audit;
mod authorization;
mod builder;
mod care;
mod credential;
mod data;
mod error;
mod files;
mod retry;
mod rpc_tls;
mod snapshots;
mod token;
mod transport;
mod workers;

pub use builder::{
    ClientBuilder, TIMEOUT_DEFAULT, is_readable_on_the_way, use_default_cryptography,
};
pub use credential::{Credential, CredentialError};
pub use data::{ByteRange, DataSource, DataStream};
pub use error::ClientError;
pub use retry::RetryPolicy;
pub use rpc_tls::RpcTls;
pub use slackwater_api::block_map::{BlockHash, BlockMap};
pub use slackwater_api::error::ProblemCode;
pub use slackwater_api::{certificate, change, exposition, query, types, worker};
pub use token::{Token, TokenError};
pub use transport::Client;
