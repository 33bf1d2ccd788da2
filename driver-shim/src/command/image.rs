//! `slackwater-driver image`: images by reference where an engine cannot make them itself, and
//! the way back to ordinary ones.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand};
use serde_json::json;

use super::published::{self, PublishedArguments, UnpublishArguments};
use super::{Format, print};
use crate::engine::containerd::Containerd;
use crate::engine::daemon::Daemon;
use crate::engine::docker::{self, Docker};
use crate::error::DriverError;
use crate::image::{self, containerd::Images, name};
use crate::settings::Config;

/// What to do with images.
#[derive(Clone, Debug, Subcommand)]
pub(super) enum ImageCommand {
    /// Make an image whose layers are references to the layers of another
    ///
    /// It is pushed and pulled as any image is, in at most 3 KiB a layer, by workers of this
    /// appliance.
    Convert(ConvertArguments),
    /// Make an image of a container, by reference, in a time that does not depend on the image
    ///
    /// The container is one of containerd, or of a Docker that keeps its images in containerd. With this driver's plugin
    /// for Docker up to 27 `docker commit` does the same.
    Commit(CommitArguments),
    /// Write an image with ordinary layers to an archive, for any engine and any machine
    Export(ExportArguments),
    /// List the snapshots that are kept for images in registries: for which, when they were published last, by whom, and
    /// what the end of that would free
    Published(PublishedArguments),
    /// Keep the snapshots of an image no more, or one snapshot; images that refer to them can no longer be pulled
    Unpublish(UnpublishArguments),
}

/// Which engine has the image.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(group(ArgGroup::new("engine").required(true).args(["docker_host", "containerd"])))]
pub(super) struct EngineArguments {
    /// Docker, such as unix:///var/run/docker.sock; where it keeps its images in containerd, they are looked for there
    #[arg(long, value_name = "ADDRESS")]
    docker_host: Option<String>,
    /// containerd, such as /run/containerd/containerd.sock
    #[arg(long, value_name = "PATH")]
    containerd: Option<PathBuf>,
    /// Namespace of containerd
    #[arg(long, value_name = "NAME", default_value = "default")]
    namespace: String,
}

/// Arguments of convert.
#[derive(Clone, Debug, Args)]
pub(super) struct ConvertArguments {
    #[command(flatten)]
    engine: EngineArguments,
    /// The image, which this worker has
    source: String,
    /// The image that is made
    target: String,
}

/// Arguments of commit.
#[derive(Clone, Debug, Args)]
pub(super) struct CommitArguments {
    #[command(flatten)]
    engine: EngineArguments,
    /// The container: its id, the beginning of it, or the name that Docker or nerdctl gave it
    container: String,
    /// The image that is made
    target: String,
}

/// Arguments of export.
#[derive(Clone, Debug, Args)]
pub(super) struct ExportArguments {
    #[command(flatten)]
    engine: EngineArguments,
    /// The image, which this worker has
    source: String,
    /// The archive, for `docker load`, `ctr images import` and `skopeo`
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
}

/// An engine that has images.
enum Engine {
    Docker(Docker),
    Containerd(Store),
}

/// containerd, and a Docker that keeps its images there, if that was asked for.
struct Store {
    containerd: Containerd,
    namespace: String,
    docker: Option<Docker>,
}

impl Store {
    fn images<'a>(&'a self, daemon: &'a Daemon) -> Images<'a> {
        Images { containerd: &self.containerd, namespace: &self.namespace, daemon }
    }

    /// What containerd calls an image that was named as its engine takes it.
    async fn name_of(&self, image: &str) -> Result<String, DriverError> {
        let Some(docker) = &self.docker else { return Ok(image.to_owned()) };
        let mut tags = docker.image(image).await?.repo_tags;
        tags.iter_mut().for_each(|tag| *tag = name::in_full(tag));
        let wanted = name::in_full(image);
        // One that was named in another way, such as by its id, has any of its names; those by digest name no archive.
        let is_tag = |tag: &String| !tag.contains('@');
        let found = tags.iter().position(|tag| *tag == wanted);
        match found.or_else(|| tags.iter().position(is_tag)) {
            Some(at) => Ok(tags.swap_remove(at)),
            None => {
                let reason = "it has no name, and containerd knows images by names: tag it";
                Err(DriverError::image(image, reason))
            }
        }
    }

    /// What containerd is to call an image that is made.
    fn target(&self, image: &str) -> Result<String, DriverError> {
        match self.docker {
            Some(_) => Ok(name::in_full(docker::checked(image)?)),
            None => Ok(image.to_owned()),
        }
    }
}

impl EngineArguments {
    async fn connect(&self) -> Result<Engine, DriverError> {
        let (containerd, namespace, docker) = match (&self.docker_host, &self.containerd) {
            (Some(host), _) => {
                let docker = Docker::new(host)?;
                let info = docker.info().await?;
                let Some(store) = info.image_store()? else { return Ok(Engine::Docker(docker)) };
                let address = store.address.strip_prefix("unix://").unwrap_or(&store.address);
                (PathBuf::from(address), store.namespaces.containers.clone(), Some(docker))
            }
            (None, Some(socket)) => (socket.clone(), self.namespace.clone(), None),
            (None, None) => {
                return Err(DriverError::Usage("give --docker-host or --containerd".to_owned()));
            }
        };
        let containerd = Containerd::connect(&containerd, &namespace).await?;
        Ok(Engine::Containerd(Store { containerd, namespace, docker }))
    }
}

pub(super) async fn run(
    command: ImageCommand,
    config: &Config,
    format: Format,
) -> Result<(), DriverError> {
    let daemon = Daemon::new(&config.control_socket);
    let made = match command {
        ImageCommand::Convert(arguments) => {
            convert(&arguments, &daemon).await?;
            json!({ "image": arguments.target })
        }
        ImageCommand::Commit(arguments) => {
            let id = commit(&arguments, &daemon).await?;
            json!({ "image": arguments.target, "container": id })
        }
        ImageCommand::Export(arguments) => {
            export(&arguments, &daemon).await?;
            json!({ "image": arguments.source, "output": arguments.output.display().to_string() })
        }
        ImageCommand::Published(arguments) => {
            return published::list(&arguments, &daemon, format).await;
        }
        ImageCommand::Unpublish(arguments) => {
            return published::unpublish(&arguments, &daemon, format).await;
        }
    };
    if format == Format::Json {
        print(&format!("{made:#}\n"));
    }
    Ok(())
}

async fn convert(arguments: &ConvertArguments, daemon: &Daemon) -> Result<(), DriverError> {
    let (source, target) = (&arguments.source, &arguments.target);
    match arguments.engine.connect().await? {
        Engine::Docker(docker) => image::docker::convert(&docker, daemon, source, target).await,
        Engine::Containerd(store) => {
            let source = store.name_of(source).await?;
            store.images(daemon).convert(&source, &store.target(target)?).await
        }
    }
}

/// Returns the container's whole id.
async fn commit(arguments: &CommitArguments, daemon: &Daemon) -> Result<String, DriverError> {
    let (container, target) = (&arguments.container, &arguments.target);
    match arguments.engine.connect().await? {
        Engine::Docker(_) => {
            let reason = "this Docker does not keep its images in containerd: use docker commit, which with this driver's \
                          plugin makes an image by reference, unless push = \"ordinary\" is set";
            Err(DriverError::image(container, reason))
        }
        Engine::Containerd(store) => {
            let (images, target) = (store.images(daemon), store.target(target)?);
            match &store.docker {
                Some(docker) => {
                    let details = docker.container(container).await?;
                    images.commit_of_docker(container, &details, &target).await
                }
                None => images.commit(container, &target).await,
            }
        }
    }
}

async fn export(arguments: &ExportArguments, daemon: &Daemon) -> Result<(), DriverError> {
    let (source, output) = (&arguments.source, &arguments.output);
    match arguments.engine.connect().await? {
        Engine::Docker(docker) => image::docker::export(&docker, daemon, source, output).await,
        Engine::Containerd(store) => {
            let source = store.name_of(source).await?;
            store.images(daemon).export(&source, output).await
        }
    }
}
