//! What every command works with: the client, the output, the rules for names.

use std::path::Path;
use std::time::Duration;

use slackwater_client::{Client, RetryPolicy, Token, is_readable_on_the_way};

use crate::arguments::Global;
use crate::failure::Failure;
use crate::output::Output;

/// Most bytes of a token or certificate file: bundles of a whole system are some 200 KiB.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// What a command works with.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) output: Output,
    pub(crate) export_path: String,
}

impl Context {
    pub(crate) fn new(global: &Global) -> Result<Self, Failure> {
        let output = Output::new(global.json);
        let mut builder = Client::builder(global.api.as_str())
            .timeout(Duration::from_secs(global.timeout))
            .retry(RetryPolicy::default());
        if let Some(token) = token(global.token_file.as_deref())? {
            if is_readable_on_the_way(&global.api) {
                output.remark("slackwater: warning: the token is sent unencrypted; use https:// beyond this machine");
            }
            builder = builder.token(token);
        }
        if let Some(path) = &global.ca {
            builder = builder.ca_certificate(read_bounded(path)?);
        }
        Ok(Self { client: builder.build()?, output, export_path: global.export_path.clone() })
    }

    /// The path below the export that the user means.
    pub(crate) fn path(&self, text: &str) -> Result<String, Failure> {
        crate::name::path(text, &self.export_path)
    }

    /// A client for long transfers, which rides out a restart of the appliance.
    pub(crate) fn patient_client(&self) -> Client {
        self.client.with_retry(RetryPolicy::patient())
    }
}

/// The token of the file, else of the environment.
fn token(file: Option<&Path>) -> Result<Option<Token>, Failure> {
    let (text, place) = match file {
        Some(path) => {
            let bytes = read_bounded(path)?;
            let text = String::from_utf8(bytes)
                .map_err(|_| Failure::Usage(format!("{}: it is not text", path.display())))?;
            (text, path.display().to_string())
        }
        None => match std::env::var("SLACKWATER_TOKEN") {
            Ok(text) if text.is_empty() => return Ok(None),
            Ok(text) => (text, "SLACKWATER_TOKEN".to_owned()),
            Err(std::env::VarError::NotPresent) => return Ok(None),
            Err(std::env::VarError::NotUnicode(_)) => {
                return Err(Failure::Usage("SLACKWATER_TOKEN: it is not text".to_owned()));
            }
        },
    };
    Token::new(&text).map(Some).map_err(|error| Failure::Usage(format!("{place}: {error}")))
}

fn read_bounded(path: &Path) -> Result<Vec<u8>, Failure> {
    let fail = |error| Failure::local("read", path, error);
    let file = std::fs::File::open(path).map_err(fail)?;
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut std::io::Read::take(file, FILE_BYTES_MAX), &mut bytes)
        .map_err(fail)?;
    Ok(bytes)
}
