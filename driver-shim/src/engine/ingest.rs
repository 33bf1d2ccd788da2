//! A content of containerd that is written while it is made.
//!
//! ```text
//! a thread that packs --pieces--> WRITE at 0, WRITE at 256 KiB, ... --> COMMIT with size and digest
//!                     no end  --> Abort
//! ```
//! To containerd an offset of 0 means that the write starts over, so each message tells how much was sent before it.

use std::collections::HashMap;

use bytes::Bytes;
use futures_util::{Stream, stream};
use tokio::sync::mpsc;
use tonic::Code;

use super::EngineError;
use super::containerd::{Containerd, PEER};
use super::proto::{
    ContentInfo, ContentInfoResponse, FieldMask, NameRequest, Nothing, STAT, UpdateContentRequest,
    WRITE, WRITE_AND_COMMIT, WriteRequest,
};
use crate::image::digest::Digest;

/// A part of a content.
#[derive(Clone, Debug)]
pub enum Piece {
    /// The next bytes.
    Data(Bytes),
    /// It is whole.
    End(Whole),
}

/// A content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whole {
    /// The digest of its bytes.
    pub digest: Digest,
    /// Their number.
    pub size_bytes: u64,
    /// What containerd notes of it.
    pub labels: HashMap<String, String>,
}

impl Containerd {
    /// Makes a content of these pieces, of which the last is its end. Without an end there is none, and this is no error.
    /// One that is there already gets the caller's lease, and the labels that it lacks.
    ///
    /// `reference` names the write, not the content: no other write of this namespace may have that name.
    ///
    /// # Errors
    /// What containerd refused.
    pub async fn ingest(
        &self,
        reference: &str,
        mut pieces: mpsc::Receiver<Piece>,
    ) -> Result<(), EngineError> {
        // A write that sends nothing is an error to containerd.
        let Some(first) = pieces.recv().await else { return Ok(()) };
        let (ended, mut end) = mpsc::channel(1);
        let sent = self.send(messages(reference.to_owned(), first, pieces, ended)).await;
        match (sent, end.try_recv().ok()) {
            (Ok(()), Some(_)) => Ok(()),
            (Err(status), Some(whole)) if status.code() == Code::AlreadyExists => {
                self.lease(reference, &whole).await?;
                self.label(&whole).await
            }
            (sent, _) => {
                self.abort(reference).await;
                Ok(sent?)
            }
        }
    }

    /// Has a content that is there kept by this lease: containerd does that for a write whose digest it knows at its
    /// beginning, and refuses the write then.
    async fn lease(&self, reference: &str, whole: &Whole) -> Result<(), EngineError> {
        let reference = format!("{reference}-kept");
        let message = WriteRequest {
            action: STAT,
            reference: reference.clone(),
            total: i64::try_from(whole.size_bytes).unwrap_or(i64::MAX),
            expected: whole.digest.to_string(),
            ..WriteRequest::default()
        };
        match self.send(stream::iter([message])).await {
            Err(status) if status.code() == Code::AlreadyExists => Ok(()),
            Err(status) => Err(status.into()),
            Ok(()) => {
                self.abort(&reference).await;
                let reason = format!("content {} was there, and went away", whole.digest);
                Err(EngineError::unexpected(PEER, reason))
            }
        }
    }

    /// Adds the labels that a content lacks: those of others stay.
    async fn label(&self, whole: &Whole) -> Result<(), EngineError> {
        let known = self.content_labels(&whole.digest.to_string()).await?;
        let missing = whole.labels.clone().into_iter();
        let labels: HashMap<_, _> =
            missing.filter(|(label, _)| !known.contains_key(label)).collect();
        if labels.is_empty() {
            return Ok(());
        }
        let paths = labels.keys().map(|label| format!("labels.{label}")).collect();
        let request = UpdateContentRequest {
            info: Some(ContentInfo { digest: whole.digest.to_string(), labels }),
            update_mask: Some(FieldMask { paths }),
        };
        let _: Nothing =
            self.unary("/containerd.services.content.v1.Content/Update", request).await?;
        Ok(())
    }

    async fn content_labels(&self, digest: &str) -> Result<HashMap<String, String>, EngineError> {
        let request = NameRequest { name: digest.to_owned() };
        let answer: ContentInfoResponse =
            self.unary("/containerd.services.content.v1.Content/Info", request).await?;
        Ok(answer.info.unwrap_or_default().labels)
    }

    /// Removes what was written so far. If this fails, containerd's garbage collection does.
    async fn abort(&self, reference: &str) {
        let path = "/containerd.services.content.v1.Content/Abort";
        let request = NameRequest { name: reference.to_owned() };
        let aborted: Result<Nothing, _> = self.unary(path, request).await;
        match aborted {
            Ok(_) => {}
            Err(status) if status.code() == Code::NotFound => {}
            Err(status) => {
                tracing::debug!(reference, %status, "an unfinished content is left to containerd");
            }
        }
    }
}

/// The messages of a write. The end goes to `ended` when it is sent.
fn messages(
    reference: String,
    first: Piece,
    pieces: mpsc::Receiver<Piece>,
    ended: mpsc::Sender<Whole>,
) -> impl Stream<Item = WriteRequest> + Send + 'static {
    let length = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    stream::unfold(
        (Some(first), pieces, ended, 0_u64),
        move |(first, mut pieces, ended, offset)| {
            let reference = reference.clone();
            async move {
                let mut message =
                    WriteRequest { reference, offset: length(offset), ..WriteRequest::default() };
                let mut next = offset;
                let piece = match first {
                    Some(first) => first,
                    None => pieces.recv().await?,
                };
                match piece {
                    Piece::Data(data) => {
                        next += data.len() as u64;
                        (message.action, message.data) = (WRITE, data);
                    }
                    Piece::End(whole) => {
                        message.action = WRITE_AND_COMMIT;
                        message.total = length(whole.size_bytes);
                        message.expected = whole.digest.to_string();
                        message.labels.clone_from(&whole.labels);
                        // There is room for the one end.
                        let _ = ended.try_send(whole);
                    }
                }
                Some((message, (None, pieces, ended, next)))
            }
        },
    )
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt;

    use super::*;

    #[tokio::test]
    async fn each_message_tells_what_was_sent_before_it() {
        let (sender, pieces) = mpsc::channel(8);
        let whole = Whole {
            digest: Digest::of(b"abcde"),
            size_bytes: 5,
            labels: HashMap::from([("a".to_owned(), "b".to_owned())]),
        };
        let data = |bytes: &[u8]| Piece::Data(Bytes::copy_from_slice(bytes));
        let first = data(b"abc");
        sender.send(data(b"de")).await.unwrap();
        sender.send(Piece::End(whole.clone())).await.unwrap();
        drop(sender);
        let (ended, mut end) = mpsc::channel(1);
        let sent: Vec<_> = messages("r".to_owned(), first, pieces, ended).collect().await;
        let parts: Vec<_> = sent
            .iter()
            .map(|message| (message.action, message.offset, &message.data[..]))
            .collect();
        assert_eq!(parts, [(1, 0, &b"abc"[..]), (1, 3, b"de"), (2, 5, b"")]);
        let last = &sent[2];
        assert_eq!((last.total, &last.expected), (5, &whole.digest.to_string()));
        assert_eq!(last.labels, whole.labels);
        assert_eq!(end.try_recv().unwrap(), whole);
    }

    #[tokio::test]
    async fn what_has_no_end_is_not_committed() {
        let (sender, pieces) = mpsc::channel(8);
        drop(sender);
        let first = Piece::Data(Bytes::from_static(b"abc"));
        let (ended, mut end) = mpsc::channel(1);
        let sent: Vec<_> = messages("r".to_owned(), first, pieces, ended).collect().await;
        assert_eq!(sent.iter().map(|message| message.action).collect::<Vec<_>>(), [WRITE]);
        assert!(end.try_recv().is_err());
    }
}
