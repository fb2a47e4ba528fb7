/* The sections of the report in their order. */
"use strict";

main.replaceChildren();
addEventListener("error", ({ error }) => error
  && main.prepend(element("p", { class: "soft" }, `A part of this page could not be drawn: ${error.message}`)));
title();
opening();
diagnosis();
curves();
rules();
kinds();
words();
disagreeingWords();
restsOn();
main.append(missingTokens(), element("p", { class: "soft" }, `Made by rlvet ${data.version}. This file loads nothing from elsewhere.`));
openAround();
