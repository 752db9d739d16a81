//! From the machine's NICs to a rank's: discovered, chosen, opened.

use std::path::PathBuf;
use std::sync::Arc;

use super::choose::{Candidate, choose};
use super::gid::Gid;
use super::port::{LinkLayer, Port, PortState};
use super::{Context, Library, Path, Settings, Sysfs};
use crate::error::VerbsError;

/// A NIC that a rank uses, open and ready to connect.
#[derive(Clone, Debug)]
pub struct Nic {
    /// The NIC.
    pub context: Arc<Context>,
    /// How its queue pairs go out.
    pub path: Path,
    /// The NUMA node it is near to.
    pub numa_node: Option<u32>,
    /// Its path in the PCI tree; none for a soft NIC.
    pub pci_path: Option<PathBuf>,
}

impl std::fmt::Display for Nic {
    /// For reports: the NIC, its address, its place.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Path { port, gid, gid_index, mtu, .. } = self.path;
        let address = gid.to_ipv4_mapped().map_or_else(|| gid.to_string(), |address| address.to_string());
        write!(f, "{} port {port}, {address} (GID {gid_index}), MTU {}", self.context.card(), mtu.bytes())?;
        if let Some(node) = self.numa_node {
            write!(f, ", NUMA node {node}")?;
        }
        match self.pci_path.as_deref().and_then(std::path::Path::file_name) {
            Some(place) => write!(f, ", PCI {}", place.display()),
            None => Ok(()),
        }
    }
}

impl Nic {
    /// The NICs of this process, which is the `nth` rank of its node: those that the settings name,
    /// or else the nearest usable one.
    ///
    /// # Errors
    /// [`VerbsError::NoCard`], [`VerbsError::NoSuchCard`]; the error of a named NIC or, if none is
    /// usable, of the first: [`VerbsError::Open`], [`VerbsError::PortDown`],
    /// [`VerbsError::NoSuchPort`], [`VerbsError::NoGid`], [`VerbsError::NoSuchGid`],
    /// [`VerbsError::MtuTooLarge`].
    pub fn open(
        library: &Arc<Library>,
        sysfs: &Sysfs,
        settings: &Settings,
        nth: u32,
    ) -> Result<Vec<Nic>, VerbsError> {
        let (names, own) = (Context::names(library)?, sysfs.own_node());
        let distance = |name: &str| sysfs.numa_distance(own?, sysfs.numa_node(name)?);
        let candidate = |name: &str| Candidate { name: name.to_owned(), distance: distance(name) };
        if !settings.cards.is_empty() {
            let cards: Vec<Candidate> = names.iter().map(|name| candidate(name)).collect();
            let chosen = choose(&cards, nth, &settings.cards)?;
            return chosen.iter().map(|&at| Self::of(library, sysfs, settings, &names[at])).collect();
        }
        let (mut usable, mut refused) = (Vec::new(), None);
        for name in &names {
            match Self::of(library, sysfs, settings, name) {
                Ok(rail) => usable.push(rail),
                Err(why) => {
                    tracing::info!(card = name, %why, "a NIC is left out");
                    refused.get_or_insert(why);
                }
            }
        }
        let cards: Vec<Candidate> = usable.iter().map(|rail| candidate(rail.context.card())).collect();
        match (choose(&cards, nth, &[]), refused) {
            (Ok(chosen), _) => Ok(chosen.iter().map(|&at| usable[at].clone()).collect()),
            (Err(_), Some(why)) => Err(why),
            (Err(why), None) => Err(why),
        }
    }

    /// Opens one NIC, if it is usable.
    fn of(library: &Arc<Library>, sysfs: &Sysfs, settings: &Settings, card: &str) -> Result<Nic, VerbsError> {
        let context = Context::open(library, card)?;
        let (port, link) = active_port(&context, settings.port)?;
        let at = (card, port.number);
        let gid = Gid::choose(&sysfs.gids(card, port.number), link, settings.gid_index, at)?;
        let mtu = settings.mtu.unwrap_or(port.mtu);
        if mtu > port.mtu {
            let (asked, active) = (mtu.bytes(), port.mtu.bytes());
            return Err(VerbsError::MtuTooLarge { card: card.to_owned(), port: port.number, asked, active });
        }
        let path = Path {
            port: port.number,
            link,
            lid: port.lid,
            gid_index: gid.index,
            gid: gid.gid,
            mtu,
            pkey_index: settings.pkey_index,
            service_level: settings.service_level,
            traffic_class: settings.traffic_class,
            timeout: settings.timeout,
            retries: settings.retries,
            rnr_retries: settings.rnr_retries,
        };
        Ok(Nic { context, path, numa_node: sysfs.numa_node(card), pci_path: sysfs.pci_path(card) })
    }
}

/// The port of this number, or the first that is active.
fn active_port(context: &Context, wanted: Option<u8>) -> Result<(Port, LinkLayer), VerbsError> {
    let ports = wanted.map_or(1..=context.attributes().ports, |port| port..=port);
    let mut down = None;
    for number in ports {
        let port = context.port(number)?;
        match (port.state, port.link) {
            (PortState::Active, Some(link)) => return Ok((port, link)),
            (PortState::Active, None) => _ = down.get_or_insert((number, "neither InfiniBand nor RoCE")),
            (state, _) => _ = down.get_or_insert((number, state.name())),
        }
    }
    let (port, state) = down.unwrap_or((1, "missing"));
    Err(VerbsError::PortDown { card: context.card().to_owned(), port, state })
}
